// Ruin and recreate on start times: the search under a KV capacity, token caps and bends.
//
// Requests lie in stages, stages at decode steps. A ruin takes some requests out, mostly near one time; the
// recreation puts each into a stage where slots, KV capacity and cap allow it, or into a new one. Requests
// that fit nowhere stay out at a charge that rises, so that walks cross incomplete schedules.
#pragma once

#include "common.hpp"

namespace core {

// Tuned values; the fields and their meaning are those of RuinParameters in parameters.py, in its order.
struct RuinParameters {
  double hot, cold, hottest_step, coldest_step, charge_start, charge_end;
  double force_in, cut, cut_requests, give_up, shift, shift_spread, most_given_up;
  double most_out, scattered, spread, new_stage, best_fit, late_fit;
  double window, windowed, windowed_stages, tried_out, patience;
};

// Which requests run when, and what slots and memory they leave: stages, and a height for each decode step.
class Timeline {
 public:
  struct Stage {
    int time = 0;
    int64_t tokens = 0;  // of prompts
    std::vector<int> members;
    bool open = false;
  };

  Timeline(const Job& job, int steps);

  // The height at a step: tokens held plus the step's number, which makes room a constant for a request while
  // it runs; without a capacity the running requests. Beyond kFull there is no free slot.
  static constexpr int kFull = 1 << 29;
  int height(int step) const { return height_[step]; }
  int limit(int request, int start) const {
    return memory_ ? static_cast<int>(job_.kv_capacity) - job_.held[request] + start : job_.slots - 1;
  }
  // The last step from `from` to before `to` that is higher than a limit, or -1; then `most` is the highest.
  int last_above(int from, int to, int limit, int& most) const;
  // The first start after a step that was too high.
  int next_start(int step, int request) const {
    const int height = height_[step];
    if (!memory_ || height >= kFull / 2) return step + 1;
    return static_cast<int>(std::min<int64_t>(step + 1, height - job_.kv_capacity + job_.held[request]));
  }
  bool overfull(int step) const {
    if (!memory_) return height_[step] > job_.slots;
    return active_[step] > job_.slots || held_[step] - step > job_.kv_capacity;
  }

  double price(const Stage& s) const {
    return s.members.empty() ? 0.0 : job_.stage_price(static_cast<double>(s.tokens)) / job_.step;
  }
  // What a stage costs more with a request, in decode steps.
  double price_more(const Stage& s, int request) const;
  double price_alone(int request) const { return job_.stage_price(job_.tokens[request]) / job_.step; }

  int open_stage(int at);
  void place(int request, int stage);
  void remove(int request);
  void shift(int stage, int to);
  void grow(int steps);

  // Changes since `record` are taken back by `undo`.
  void record() {
    log_.clear();
    logging_ = true;
  }
  void stop_recording() { logging_ = false; }
  void undo();

  int stages() const { return static_cast<int>(order_.size()); }
  int id_at(int place) const { return order_[place]; }
  int time_at(int place) const { return times_[place]; }
  int first_at(int step) const {
    return static_cast<int>(std::lower_bound(times_.begin(), times_.end(), step) - times_.begin());
  }
  const Stage& stage(int id) const { return stage_[id]; }
  int stage_of(int request) const { return stage_of_[request]; }
  bool is_out(int request) const { return stage_of_[request] < 0; }
  int end_of(int request) const { return stage_[stage_of_[request]].time + job_.steps[request]; }
  int begin() const { return times_.empty() ? 0 : times_[0]; }
  int end() const { return end_; }
  int missing() const { return missing_; }
  double cost() const { return stage_cost_ + end_ - begin(); }  // decode steps
  void check() const;

 private:
  enum class Kind { kPlace, kRemove, kShift };
  struct Change {
    Kind kind;
    int request, stage, time;
  };
  static constexpr int kBlock = 16;  // steps of which the highest is kept

  void reopen(int id, int at);
  void close(int id);
  void insert_in_order(int id, int at);
  int place_in_order(int id) const;
  void raise(int from, int steps, int held, int sign);
  void finish_at(int step, int count);

  const Job& job_;
  const bool memory_;
  int size_ = 0, end_ = 0, missing_;
  double stage_cost_ = 0;
  std::vector<int> height_, held_, active_, highest_, ending_;
  std::vector<Stage> stage_;
  std::vector<int> free_, order_, times_, stage_of_, place_of_;
  std::vector<Change> log_;
  bool logging_ = false;
};

inline Timeline::Timeline(const Job& job, int steps)
    : job_(job),
      memory_(job.has_memory()),
      missing_(job.requests),
      stage_of_(job.requests, -1),
      place_of_(job.requests, 0) {
  grow(steps);
}

inline void Timeline::grow(int steps) {
  const int size = (steps / kBlock + 2) * kBlock;
  if (size <= size_) return;
  height_.resize(size);
  held_.resize(size);
  active_.resize(size, 0);
  ending_.resize(size + 1, 0);
  highest_.resize(size / kBlock);
  for (int t = size_; t < size; t++) {
    held_[t] = t;
    height_[t] = memory_ ? t : 0;
  }
  for (int block = size_ / kBlock; block < size / kBlock; block++)
    highest_[block] = memory_ ? (block + 1) * kBlock - 1 : 0;
  size_ = size;
}

CORE_CLONES inline void raise_memory(int* __restrict active, int* __restrict held, int* __restrict height,
                                     int steps, int first, int sign, int slots) {
  for (int k = 0; k < steps; k++) {
    active[k] += sign;
    held[k] += sign * (first + k);
    height[k] = held[k] + (active[k] >= slots ? Timeline::kFull : 0);
  }
}

inline void Timeline::raise(int from, int steps, int held, int sign) {
  if (memory_)
    raise_memory(&active_[from], &held_[from], &height_[from], steps, held, sign, job_.slots);
  else
    for (int t = from; t < from + steps; t++) height_[t] += sign;
  for (int block = from / kBlock, last = (from + steps - 1) / kBlock; block <= last; block++) {
    const int* heights = &height_[block * kBlock];
    int most = heights[0];
    for (int k = 1; k < kBlock; k++) most = std::max(most, heights[k]);
    highest_[block] = most;
  }
}

inline int Timeline::last_above(int from, int to, int limit, int& most) const {
  int t = to - 1;
  most = -kFull;
  for (; t >= from && t % kBlock != kBlock - 1; t--) {
    if (height_[t] > limit) return t;
    most = std::max(most, height_[t]);
  }
  for (; t - kBlock + 1 >= from; t -= kBlock) {
    if (highest_[t / kBlock] > limit) {
      while (height_[t] <= limit) t--;
      return t;
    }
    most = std::max(most, highest_[t / kBlock]);
  }
  for (; t >= from; t--) {
    if (height_[t] > limit) return t;
    most = std::max(most, height_[t]);
  }
  return -1;
}

inline double Timeline::price_more(const Stage& s, int request) const {
  return job_.stage_price(static_cast<double>(s.tokens + job_.tokens[request])) / job_.step - price(s);
}

inline int Timeline::place_in_order(int id) const {
  int k = first_at(stage_[id].time);
  while (order_[k] != id) k++;
  return k;
}

inline void Timeline::insert_in_order(int id, int at) {
  const auto k = std::upper_bound(times_.begin(), times_.end(), at) - times_.begin();
  times_.insert(times_.begin() + k, at);
  order_.insert(order_.begin() + k, id);
  stage_[id].time = at;
}

inline void Timeline::reopen(int id, int at) {
  Stage& s = stage_[id];
  s.tokens = 0;
  s.members.clear();
  s.open = true;
  insert_in_order(id, at);
}

inline int Timeline::open_stage(int at) {
  int id = -1;
  while (id < 0 && !free_.empty()) {  // an undone closing leaves an open stage in the list
    if (!stage_[free_.back()].open) id = free_.back();
    free_.pop_back();
  }
  if (id < 0) {
    id = static_cast<int>(stage_.size());
    stage_.emplace_back();
  }
  reopen(id, at);
  return id;
}

inline void Timeline::close(int id) {
  const int k = place_in_order(id);
  times_.erase(times_.begin() + k);
  order_.erase(order_.begin() + k);
  stage_[id].open = false;
  free_.push_back(id);
}

inline void Timeline::finish_at(int step, int count) {
  ending_[step] += count;
  end_ = std::max(end_, step);
  while (end_ > 0 && !ending_[end_]) end_--;
}

inline void Timeline::place(int request, int id) {
  Stage& s = stage_[id];
  const int end = s.time + job_.steps[request];
  if (end + 1 > size_) grow(end + end / 4 + 64);
  stage_cost_ -= price(s);
  s.tokens += job_.tokens[request];
  place_of_[request] = static_cast<int>(s.members.size());
  s.members.push_back(request);
  stage_of_[request] = id;
  stage_cost_ += price(s);
  raise(s.time, job_.steps[request], job_.held[request], 1);
  finish_at(end, 1);
  missing_--;
  if (logging_) log_.push_back({Kind::kPlace, request, id, s.time});
}

inline void Timeline::remove(int request) {
  const int id = stage_of_[request];
  Stage& s = stage_[id];
  const int at = s.time;
  stage_cost_ -= price(s);
  s.tokens -= job_.tokens[request];
  const int last = s.members.back();
  s.members[place_of_[request]] = last;
  place_of_[last] = place_of_[request];
  s.members.pop_back();
  stage_of_[request] = -1;
  stage_cost_ += price(s);
  raise(at, job_.steps[request], job_.held[request], -1);
  finish_at(at + job_.steps[request], -1);
  missing_++;
  if (s.members.empty()) close(id);
  if (logging_) log_.push_back({Kind::kRemove, request, id, at});
}

inline void Timeline::shift(int id, int to) {
  const int from = stage_[id].time;
  if (from == to) return;
  for (int i : stage_[id].members) {
    raise(from, job_.steps[i], job_.held[i], -1);
    ending_[from + job_.steps[i]]--;
  }
  const int k = place_in_order(id);
  times_.erase(times_.begin() + k);
  order_.erase(order_.begin() + k);
  insert_in_order(id, to);
  for (int i : stage_[id].members) {
    const int end = to + job_.steps[i];
    if (end + 1 > size_) grow(end + end / 4 + 64);
    raise(to, job_.steps[i], job_.held[i], 1);
    finish_at(end, 1);
  }
  while (end_ > 0 && !ending_[end_]) end_--;
  if (logging_) log_.push_back({Kind::kShift, -1, id, from});
}

inline void Timeline::undo() {
  logging_ = false;
  for (size_t k = log_.size(); k-- > 0;) {
    const Change& change = log_[k];
    switch (change.kind) {
      case Kind::kPlace:
        remove(change.request);
        break;
      case Kind::kRemove:
        if (!stage_[change.stage].open) reopen(change.stage, change.time);
        place(change.request, change.stage);
        break;
      case Kind::kShift:
        shift(change.stage, change.time);
        break;
    }
  }
  log_.clear();
}

// Recomputes heights, ends and costs (debug build only).
inline void Timeline::check() const {
#ifdef CORE_CHECKS
  std::vector<int> active(size_, 0);
  std::vector<int64_t> held(size_, 0);
  double cost = 0;
  int end = 0, members = 0;
  for (size_t k = 0; k < order_.size(); k++) {
    const Stage& s = stage_[order_[k]];
    CORE_REQUIRE(s.open && s.time == times_[k] && !s.members.empty());
    CORE_REQUIRE(k == 0 || times_[k - 1] <= times_[k]);
    int64_t tokens = 0;
    for (int i : s.members) {
      CORE_REQUIRE(stage_of_[i] == order_[k]);
      members++;
      tokens += job_.tokens[i];
      for (int t = 0; t < job_.steps[i]; t++) {
        active[s.time + t]++;
        held[s.time + t] += job_.held[i] + t;
      }
      end = std::max(end, s.time + job_.steps[i]);
    }
    CORE_REQUIRE(tokens == s.tokens);
    cost += price(s);
  }
  CORE_REQUIRE(members + missing_ == job_.requests);
  CORE_REQUIRE(end == end_);
  CORE_REQUIRE(std::abs(cost - stage_cost_) < 1e-6 * (1 + cost));
  for (int t = 0; t < size_; t++) {
    if (memory_) {
      CORE_REQUIRE(active[t] == active_[t] && held[t] + t == held_[t]);
      CORE_REQUIRE(height_[t] == held_[t] + (active[t] >= job_.slots ? kFull : 0));
    } else {
      CORE_REQUIRE(active[t] == height_[t]);
    }
    if (t % kBlock == 0)
      CORE_REQUIRE(highest_[t / kBlock] == *std::max_element(&height_[t], &height_[t] + kBlock));
  }
#endif
}

class RuinRecreate {
 public:
  RuinRecreate(const Job& job, const RuinParameters& parameters, const Limits& limits, uint64_t seed,
               int steps);

  // Begins with a schedule, which may break limits: requests that are too many are taken out.
  void load(const int32_t* start, const int32_t* stage);
  // Searches until the limits are used up.
  void run();
  // Copies the best schedule; infinite cost if there is none.
  double best(Plan& plan) const;
  int64_t moves() const { return budget_.moves(); }

 private:
  struct Kept {
    double cost = kNever;
    std::vector<int> start, stage;
  };
  struct Range {  // places of stages that a recreation looks at
    int first, last;
  };

  double cost(double charge) const { return line_.cost() + charge * charge_out_; }
  double hot() const { return std::max(p_.hot * stage_unit_, p_.hottest_step); }
  double cold() const { return std::max(p_.cold * stage_unit_, p_.coldest_step); }
  void take_out(int request);
  void put_in(int request, int stage);
  void clear_over(int from, int to, int keep);
  bool force_in();
  void ruin();
  bool cut_steps();
  void give_up_stage();
  void shift_stage();
  void take_out_near();
  void recreate();
  bool insert(int request, int end, Range range, bool whatever_it_costs);
  bool insert_in_new_stage(int request, int end, Range range, bool earliest);
  void decide();
  void complete();
  void restart_from_best();
  void begin_at_zero();
  void keep_best();
  void place_all(const int32_t* start, const int32_t* stage);

  const Job& job_;
  const RuinParameters& p_;
  Budget budget_;
  Random random_;
  Timeline line_;
  double stage_unit_ = 0, mean_steps_ = 0;
  int longest_ = 0;
  std::vector<double> charge_;  // of a request left out, decode steps
  double charge_out_ = 0;       // of all that are out
  double charge_before_ = 0;    // before the ruin
  std::vector<int> out_;        // requests left out by the accepted schedule
  std::vector<int> ruined_;     // and those taken out of it now
  std::vector<int> running_, todo_;
  std::vector<std::pair<double, int>> keys_;
  double charge_price_ = 1, heat_ = 1, accepted_ = 0, last_whole_ = 0, least_completed_ = kNever;
  int near_ = -1;  // the time of the ruin, or -1
  int end_ = 0;    // no recreated request ends later
  Kept best_;
};

inline RuinRecreate::RuinRecreate(const Job& job, const RuinParameters& parameters, const Limits& limits,
                                  uint64_t seed, int steps)
    : job_(job), p_(parameters), budget_(limits), random_(seed), line_(job, steps) {
  double tokens = 0;
  for (int i = 0; i < job.requests; i++) {
    tokens += job.tokens[i];
    mean_steps_ += job.steps[i];
    longest_ = std::max(longest_, job.steps[i]);
  }
  mean_steps_ /= job.requests;
  stage_unit_ = job.stage_price(tokens / job.requests) / job.step;
  for (int i = 0; i < job.requests; i++) {
    const double memory =
        job.has_memory() ? (job.held[i] + job.steps[i] / 2.0) / static_cast<double>(job.kv_capacity) : 0;
    const double area = std::max(memory, 1.0 / job.slots);
    charge_.push_back(job.steps[i] * area * std::sqrt(job.steps[i] / mean_steps_));
    charge_out_ += charge_.back();
  }
}

inline void RuinRecreate::take_out(int request) {
  line_.remove(request);
  charge_out_ += charge_[request];
  ruined_.push_back(request);
}

inline void RuinRecreate::put_in(int request, int stage) {
  line_.place(request, stage);
  charge_out_ -= charge_[request];
}

inline void RuinRecreate::place_all(const int32_t* start, const int32_t* stage) {
  std::vector<int> id(1 + *std::max_element(stage, stage + job_.requests), -1);
  for (int i = 0; i < job_.requests; i++) {
    if (id[stage[i]] < 0) id[stage[i]] = line_.open_stage(start[i]);
    put_in(i, id[stage[i]]);
  }
}

inline void RuinRecreate::load(const int32_t* start, const int32_t* stage) {
  place_all(start, stage);
  clear_over(0, line_.end(), -1);
  for (int i = 0; i < job_.requests; i++)
    if (line_.is_out(i)) out_.push_back(i);
  if (out_.empty()) keep_best();
  line_.check();
}

// Takes out requests until slots and memory are enough at each of some steps: of two drawn the cheaper one.
inline void RuinRecreate::clear_over(int from, int to, int keep) {
  for (int t = from; t < to; t++)
    while (line_.overfull(t)) {
      running_.clear();
      for (int k = line_.first_at(t - longest_ + 1); k < line_.stages() && line_.time_at(k) <= t; k++)
        for (int i : line_.stage(line_.id_at(k)).members)
          if (line_.end_of(i) > t && i != keep) running_.push_back(i);
      if (running_.empty()) break;
      const int count = static_cast<int>(running_.size());
      const int a = running_[random_.below(count)], b = running_[random_.below(count)];
      take_out(charge_[a] < charge_[b] ? a : b);
    }
}

// A request that was left out goes into the roomiest of some stages, and others make way.
inline bool RuinRecreate::force_in() {
  const int request = out_[random_.below(static_cast<int>(out_.size()))], stages = line_.stages();
  if (stages == 0) return false;
  int chosen = -1, roomiest = std::numeric_limits<int>::min();
  for (int k = random_.below(8); k >= 0; k--) {
    const int place = random_.below(stages), at = line_.time_at(place);
    const Timeline::Stage& stage = line_.stage(line_.id_at(place));
    if (at + job_.steps[request] > end_) continue;
    if (!job_.within_cap(stage.tokens + job_.tokens[request])) continue;
    int most;
    line_.last_above(at, at + job_.steps[request], std::numeric_limits<int>::max(), most);
    const int room = line_.limit(request, at) - most;
    if (room > roomiest) roomiest = room, chosen = place;
  }
  if (chosen < 0) return false;
  near_ = line_.time_at(chosen);
  put_in(request, line_.id_at(chosen));
  clear_over(near_, near_ + job_.steps[request], request);
  return true;
}

// The job becomes some steps shorter, at its end or before a stage; what has no room then is taken out.
inline bool RuinRecreate::cut_steps() {
  int steps = 1;
  while (random_.chance(0.7) && steps < end_ - line_.begin() - 1) steps++;
  if (random_.chance(0.5)) {
    for (int i = 0; i < job_.requests; i++)
      if (!line_.is_out(i) && line_.end_of(i) > end_ - steps) take_out(i);
    end_ -= steps;
    return true;
  }
  const int stages = line_.stages(), place = 1 + random_.below(std::max(1, stages - 1));
  if (place >= stages) return false;
  steps = std::min(steps, line_.time_at(place) - line_.time_at(place - 1));
  if (steps <= 0) return false;
  const int from = line_.time_at(place) - steps;
  std::vector<int> later;
  for (int k = place; k < stages; k++) later.push_back(line_.id_at(k));
  for (int id : later) line_.shift(id, line_.stage(id).time - steps);
  clear_over(from, line_.end(), -1);
  end_ = line_.end();
  return true;
}

inline void RuinRecreate::give_up_stage() {
  const int stages = line_.stages();
  int a = line_.id_at(random_.below(stages));
  const int b = line_.id_at(random_.below(stages));
  if (line_.stage(b).members.size() < line_.stage(a).members.size() && random_.chance(0.7)) a = b;
  if (static_cast<double>(line_.stage(a).members.size()) > p_.most_given_up) return;
  const std::vector<int> members = line_.stage(a).members;
  for (int i : members) take_out(i);
}

inline void RuinRecreate::shift_stage() {
  const int stages = line_.stages();
  if (stages < 2) return;
  const int id = line_.id_at(1 + random_.below(stages - 1));
  const int by = random_.sign() * (1 + static_cast<int>(std::exp(p_.shift_spread + random_.normal())));
  const int to = std::max(0, line_.stage(id).time + by);
  int last = to;
  for (int i : line_.stage(id).members) last = std::max(last, to + job_.steps[i]);
  if (last > end_) return;
  line_.shift(id, to);
  clear_over(to, last, -1);
}

// Some requests are taken out, mostly of stages near one time.
inline void RuinRecreate::take_out_near() {
  if (line_.stages() == 0) return;
  const int length = std::max(1, end_ - line_.begin()),
            count = 1 + random_.below(static_cast<int>(p_.most_out));
  const bool drawn = ruined_.empty() || line_.is_out(ruined_[0]);
  near_ = drawn ? line_.begin() + random_.below(length) : line_.stage(line_.stage_of(ruined_[0])).time;
  if (random_.chance(p_.scattered)) {
    for (int k = 0; k < count; k++)
      if (const int i = random_.below(job_.requests); !line_.is_out(i)) take_out(i);
    return;
  }
  for (int k = 0; k < count && line_.stages() > 0; k++) {
    const double at = near_ + p_.spread * length * random_.sign() * random_.exponential();
    int place = std::min(line_.stages() - 1, line_.first_at(static_cast<int>(at)));
    if (place > 0 && at - line_.time_at(place - 1) < line_.time_at(place) - at) place--;
    const std::vector<int>& members = line_.stage(line_.id_at(place)).members;
    take_out(members[random_.below(static_cast<int>(members.size()))]);
  }
}

inline void RuinRecreate::ruin() {
  ruined_.clear();
  near_ = -1;
  end_ = line_.end();
  if (line_.stages() == 0) return;
  if (!out_.empty() && random_.chance(p_.force_in)) {
    force_in();
    return;
  }
  const double kind = random_.uniform();
  const double cuts = std::min(1.0, p_.cut_requests / job_.requests) + 0.02;
  if (kind < p_.cut && random_.chance(cuts) && (out_.empty() || random_.chance(0.2)))
    cut_steps();
  else if (kind < p_.cut + p_.give_up)
    give_up_stage();
  else if (kind < p_.cut + p_.give_up + p_.shift)
    shift_stage();
  take_out_near();
}

// Puts a request into the stage that a drawn criterion likes best of those that cost least more.
inline bool RuinRecreate::insert(int request, int end, Range range, bool whatever_it_costs) {
  const int steps = job_.steps[request];
  const double draw = whatever_it_costs ? p_.best_fit : random_.uniform(), alone = line_.price_alone(request);
  const int last = std::min(range.last, line_.stages());
  if (!whatever_it_costs && random_.chance(p_.new_stage))
    return insert_in_new_stage(request, end, range, false);
  int chosen = -1, skip = -1;
  double least = kNever, least_price = kNever;
  for (int k = std::max(0, range.first); k < last; k++) {
    const int at = line_.time_at(k);
    if (at + steps > end) break;
    if (at < skip) continue;
    int most;
    const int limit = line_.limit(request, at), above = line_.last_above(at, at + steps, limit, most);
    if (above >= 0) {
      skip = line_.next_start(above, request);
      continue;
    }
    const Timeline::Stage& stage = line_.stage(line_.id_at(k));
    if (!job_.within_cap(stage.tokens + job_.tokens[request])) continue;
    const double price = line_.price_more(stage, request), near = 0.1 * stage_unit_ + kTie;
    if (price > alone + kTie || price > least_price + near) continue;
    double score;
    if (draw < p_.best_fit) {
      const int next = line_.first_at(at + steps);
      score =
          job_.has_memory() ? limit - most : (next < line_.stages() ? line_.time_at(next) : end) - at - steps;
      score += 1e-3 * random_.uniform();
    } else {
      score = draw < p_.best_fit + p_.late_fit ? -k : random_.uniform();
    }
    if (price < least_price - near) least = kNever, least_price = price;
    if (score < least) least = score, chosen = k;
  }
  if (chosen >= 0) {
    put_in(request, line_.id_at(chosen));
    return true;
  }
  if (!whatever_it_costs && alone > charge_price_ * charge_[request]) return false;
  return insert_in_new_stage(request, end, range, whatever_it_costs);
}

// Puts a request into a new stage at the tightest, a drawn, or the last start that leaves it room.
inline bool RuinRecreate::insert_in_new_stage(int request, int end, Range range, bool latest) {
  const int steps = job_.steps[request], stages = line_.stages();
  const bool tightest = random_.chance(1.0 / 3);
  int at = range.first > 0 && range.first < stages ? line_.time_at(range.first) : 0;
  const int last = range.last < stages ? line_.time_at(range.last) : end;
  int chosen = -1, met = 0, least = std::numeric_limits<int>::max();
  while (at + steps <= end && at <= last) {
    int most;
    const int limit = line_.limit(request, at), above = line_.last_above(at, at + steps, limit, most);
    if (above >= 0) {
      at = std::max(at + 1, line_.next_start(above, request));
      continue;
    }
    met++;
    if (latest)
      chosen = at;
    else if (tightest && limit - most < least)
      least = limit - most, chosen = at;
    else if (!tightest && random_.below(met) == 0)
      chosen = at;
    at += 1 + random_.below(std::max(1, steps / 4));
  }
  if (chosen < 0) return false;
  const int place = line_.first_at(chosen);
  if (place < line_.stages() && line_.time_at(place) == chosen) {
    const Timeline::Stage& stage = line_.stage(line_.id_at(place));
    if (job_.within_cap(stage.tokens + job_.tokens[request]) &&
        line_.price_more(stage, request) <= line_.price_alone(request)) {
      put_in(request, line_.id_at(place));
      return true;
    }
  }
  put_in(request, line_.open_stage(chosen));
  return true;
}

// Puts in what was taken out and some of what was left out, in a drawn order, near the ruin for the most
// part.
inline void RuinRecreate::recreate() {
  todo_ = ruined_;
  const int tried = static_cast<int>(p_.tried_out), left = static_cast<int>(out_.size());
  for (int k = 0; k < std::min(tried, left); k++)
    todo_.push_back(left <= tried ? out_[k] : out_[random_.below(left)]);
  std::sort(todo_.begin(), todo_.end());
  todo_.erase(std::unique(todo_.begin(), todo_.end()), todo_.end());
  Range range = {0, std::numeric_limits<int>::max()};
  if (line_.stages() > p_.windowed_stages && near_ >= 0 && random_.chance(p_.windowed)) {
    const double width = p_.window * mean_steps_ * (0.5 + random_.uniform());
    range = {line_.first_at(static_cast<int>(near_ - width)),
             line_.first_at(static_cast<int>(near_ + width)) + 1};
  }
  keys_.clear();
  const double kind = random_.uniform();
  for (int i : todo_) {
    if (!line_.is_out(i)) continue;
    double key = charge_[i];
    if (kind > 0.8) key = random_.uniform();
    if (kind > 0.4 && kind <= 0.8) key = kind < 0.7 ? job_.steps[i] : job_.steps[i] + job_.held[i];
    keys_.push_back({-key * (1 + 0.1 * random_.normal()), i});
  }
  std::sort(keys_.begin(), keys_.end());
  for (const auto& [key, i] : keys_) insert(i, end_, range, false);
}

inline void RuinRecreate::keep_best() {
  if (cost(0) >= best_.cost - kTie) return;
  best_.cost = cost(0);
  budget_.found(best_.cost);
  best_.start.resize(job_.requests);
  best_.stage.resize(job_.requests);
  for (int k = 0; k < line_.stages(); k++)
    for (int i : line_.stage(line_.id_at(k)).members) {
      best_.start[i] = line_.time_at(k);
      best_.stage[i] = k;
    }
}

// Puts what is left out at the end, for a whole schedule, and takes it back.
inline void RuinRecreate::complete() {
  std::vector<int> left = out_;
  std::sort(left.begin(), left.end(), [&](int a, int b) { return job_.steps[a] > job_.steps[b]; });
  line_.record();
  const double charged = charge_out_;
  for (int i : left) {
    const int end = line_.end() + job_.steps[i] + 1;
    line_.grow(end + 2);
    insert(i, end, {0, std::numeric_limits<int>::max()}, true);
  }
  if (line_.missing() == 0) keep_best();
  line_.undo();
  charge_out_ = charged;
}

inline void RuinRecreate::restart_from_best() {
  for (int i = 0; i < job_.requests; i++)
    if (!line_.is_out(i)) take_out(i);
  place_all(best_.start.data(), best_.stage.data());
  out_.clear();
}

// Moves everything so that the first stage happens at once.
inline void RuinRecreate::begin_at_zero() {
  const int by = line_.begin();
  if (by == 0) return;
  std::vector<int> ids;
  for (int k = 0; k < line_.stages(); k++) ids.push_back(line_.id_at(k));
  for (int id : ids) line_.shift(id, line_.stage(id).time - by);
}

// Accepts the recreated schedule or takes it back.
inline void RuinRecreate::decide() {
  line_.stop_recording();
  const double now = cost(charge_price_);
  if (now > accepted_ + heat_ * random_.exponential()) {
    line_.undo();
    charge_out_ = charge_before_;
    return;
  }
  accepted_ = now;
  out_.insert(out_.end(), ruined_.begin(), ruined_.end());
  std::sort(out_.begin(), out_.end());
  out_.erase(std::unique(out_.begin(), out_.end()), out_.end());
  out_.erase(std::remove_if(out_.begin(), out_.end(), [&](int i) { return !line_.is_out(i); }), out_.end());
  if (out_.empty()) {
    keep_best();
    last_whole_ = budget_.used();
    begin_at_zero();
    return;
  }
  if (const double full = cost(p_.charge_end); full < least_completed_ - kTie) {
    least_completed_ = full;
    complete();
  }
  if (budget_.used() - last_whole_ > p_.patience && best_.cost < kNever) {
    restart_from_best();
    accepted_ = cost(charge_price_);
    last_whole_ = budget_.used();
  }
}

inline void RuinRecreate::run() {
  for (int64_t move = 0; !budget_.over(); move++) {
    if (move % 16 == 0) {
      const double done = budget_.used();
      charge_price_ = cooled(p_.charge_start, p_.charge_end, done);
      heat_ = cooled(hot(), cold(), done);
      accepted_ = cost(charge_price_);
      if (move % 4096 == 0) line_.check();
    }
    charge_before_ = charge_out_;
    line_.record();
    ruin();
    recreate();
    decide();
    budget_.spend();
  }
}

inline double RuinRecreate::best(Plan& plan) const {
  if (best_.start.empty()) return kNever;
  std::copy(best_.start.begin(), best_.start.end(), plan.start);
  std::copy(best_.stage.begin(), best_.stage.end(), plan.stage);
  return best_.cost;
}

}  // namespace core
