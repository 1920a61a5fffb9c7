// Orders placed backward: the search for few requests under a KV capacity.
//
// Requests are placed one after another in some order, counted back from the end of the job: each ends as
// late as it fits. Backward a request frees a token a step, so one that fits at its end fits in all of its
// steps unless others end there. Only events matter, the steps at which a request begins or ends; the search
// anneals over the order, and over how much earlier a request may start to share a stage that there is.
#pragma once

#include <array>
#include <cstring>
#include <numeric>

#include "common.hpp"

namespace core {

// Tuned values; the fields and their meaning are those of EventParameters in parameters.py, in its order.
struct EventParameters {
  double hot, hot_requests, cold, cycle_moves, reach_moves, reach_none, reach_short, short_reach, long_reach;
  double far_moves, near_distance, swaps;
};

// What is held from each event to the next one, in steps counted back from the end.
class Profile {
 public:
  void reset(int requests, int capacity) {
    for (auto* column : columns()) column->assign(2 * requests + 4, 0);
    size = 1;
    room[0] = capacity;
  }
  void copy(const Profile& other) {
    size = other.size;
    const auto from = other.columns();
    const auto to = columns();
    for (size_t k = 0; k < to.size(); k++) std::memcpy(to[k]->data(), from[k]->data(), size * sizeof(int));
  }
  bool same(const Profile& other) const {
    const auto equal = [&](const std::vector<int>& a, const std::vector<int>& b) {
      return !std::memcmp(a.data(), b.data(), size * sizeof(int));
    };
    return size == other.size && equal(time, other.time) && equal(held, other.held) &&
           equal(tokens, other.tokens);
  }
  int first_at(int at) const {
    return static_cast<int>(std::lower_bound(time.begin(), time.begin() + size, at) - time.begin());
  }
  int end() const { return time[size - 1]; }

  std::vector<int> time, held, active;
  std::vector<int> high;    // held tokens less the time, or kFull without a free slot
  std::vector<int> room;    // most tokens free before the next event; -1 without a free slot
  std::vector<int> tokens;  // of the prefill stage at the event
  int size = 0;

  static constexpr int kFull = 1 << 29;

 private:
  std::array<std::vector<int>*, 6> columns() { return {&time, &held, &active, &high, &room, &tokens}; }
  std::array<const std::vector<int>*, 6> columns() const {
    return {&time, &held, &active, &high, &room, &tokens};
  }
  friend class EventOrders;
};

class EventOrders {
 public:
  EventOrders(const Job& job, const EventParameters& parameters, const Limits& limits, uint64_t seed);

  // Begins with the order in which the requests of a schedule end, the last one first.
  void load(const int32_t* start);
  // Searches until the limits are used up.
  void run();
  // Copies the best schedule.
  double best(Plan& plan) const;
  int64_t moves() const { return budget_.moves(); }

 private:
  struct Move {
    int first, last;   // places in the order that change
    int request = -1;  // whose reach changed, or -1
    double old_reach = 0;
  };

  int fit(const Profile& profile, int from, int request) const;
  int event(Profile& profile, int at);
  int place(Profile& profile, int request);
  double stage_cost(const Profile& profile) const;
  double place_all();
  bool draw(Move& move);
  void attempt(const Move& move);
  void keep_best(double cost);
  void check() const;

  const Job& job_;
  const EventParameters& p_;
  Budget budget_;
  Random random_;
  int count_, capacity_, longest_ = 0;
  std::vector<int> peak_;                     // tokens that each request holds in its last step
  std::vector<int> order_, trial_;            // requests, the one placed first first
  std::vector<double> reach_;                 // steps that each may start earlier to join a stage
  std::vector<int> back_, trial_back_;        // steps between the end of each request and of the job
  std::vector<Profile> after_, trial_after_;  // the profile before each place of the order, and at last
  double now_ = 0, heat_ = 1;
  double best_cost_ = kNever;
  std::vector<int> best_back_, best_order_;
  std::vector<double> best_reach_;
};

inline EventOrders::EventOrders(const Job& job, const EventParameters& parameters, const Limits& limits,
                                uint64_t seed)
    : job_(job),
      p_(parameters),
      budget_(limits),
      random_(seed),
      count_(job.requests),
      capacity_(job.has_memory() ? static_cast<int>(job.kv_capacity) : Profile::kFull / 2),
      order_(count_),
      reach_(count_, 0.0),
      back_(count_),
      trial_back_(count_),
      after_(count_ + 1),
      trial_after_(count_ + 1) {
  for (int i = 0; i < count_; i++) {
    peak_.push_back(job.held[i] + job.steps[i] - 1);
    longest_ = std::max(longest_, job.steps[i]);
  }
  for (auto* profiles : {&after_, &trial_after_})
    for (Profile& profile : *profiles) profile.reset(count_, capacity_);
  std::iota(order_.begin(), order_.end(), 0);
}

inline void EventOrders::load(const int32_t* start) {
  std::sort(order_.begin(), order_.end(), [&](int a, int b) {
    const int ends_a = start[a] + job_.steps[a], ends_b = start[b] + job_.steps[b];
    return ends_a != ends_b ? ends_a > ends_b : a < b;
  });
}

// The first step back, not before `from`, at which a request can end.
inline int EventOrders::fit(const Profile& profile, int from, int request) const {
  const int steps = job_.steps[request], peak = peak_[request];
  const int* time = profile.time.data();
  int at = from, k = static_cast<int>(std::upper_bound(time, time + profile.size, at) - time) - 1;
  while (true) {
    if (profile.room[k] < peak) {
      do k++;
      while (profile.room[k] < peak);
      at = time[k];
    }
    // What is held shrinks by a token a step for each running request.
    const int active = profile.active[k], lack = profile.held[k] - active * (at - time[k]) + peak - capacity_;
    if (lack > 0) at += (lack + active - 1) / active;
    if (k + 1 < profile.size && at >= time[k + 1]) {
      do k++;
      while (k + 1 < profile.size && time[k + 1] <= at);
      continue;
    }
    const int most = capacity_ - peak - at;
    int last = k + 1;
    while (last < profile.size && time[last] < at + steps) last++;
    for (last--; last > k; last--)
      if (profile.high[last] > most) break;
    if (last == k) return at;
    k = last;
    at = time[k];
  }
}

// The place of an event at a step, which is made if there is none.
inline int EventOrders::event(Profile& profile, int at) {
  const int k = profile.first_at(at);
  if (k < profile.size && profile.time[k] == at) return k;
  const int active = profile.active[k - 1];
  const int held = profile.held[k - 1] - active * (at - profile.time[k - 1]), room = profile.room[k - 1];
  for (auto* column : profile.columns())
    std::memmove(column->data() + k + 1, column->data() + k, (profile.size - k) * sizeof(int));
  profile.size++;
  profile.time[k] = at;
  profile.held[k] = held;
  profile.active[k] = active;
  profile.high[k] = active >= job_.slots ? Profile::kFull : held - at;
  profile.room[k] = room;
  profile.tokens[k] = 0;
  return k;
}

// Places a request as late as it fits, or within its reach at a stage that there is; returns its end.
inline int EventOrders::place(Profile& profile, int request) {
  const int steps = job_.steps[request], tokens = job_.tokens[request];
  int at = fit(profile, 0, request);
  if (reach_[request] > 0)
    for (int k = profile.first_at(at + steps);
         k < profile.size && profile.time[k] <= at + steps + reach_[request]; k++) {
      const int end = profile.time[k] - steps;
      if (!profile.tokens[k] || !job_.within_cap(profile.tokens[k] + tokens)) continue;
      if (fit(profile, end, request) != end) continue;
      at = end;
      break;
    }
  for (int k = profile.first_at(at + steps); k < profile.size && profile.time[k] == at + steps;
       k = profile.first_at(at + steps)) {
    if (job_.within_cap(profile.tokens[k] + tokens)) break;
    at = fit(profile, at + 1, request);
  }
  const int first = event(profile, at), last = event(profile, at + steps);
  profile.tokens[last] += tokens;
  for (int k = first; k < last; k++) {
    const int time = profile.time[k];
    profile.held[k] += peak_[request] - time + at;
    const int active = ++profile.active[k];
    const bool free = active < job_.slots;
    profile.high[k] = free ? profile.held[k] - time : Profile::kFull;
    profile.room[k] = free ? capacity_ - (profile.held[k] - active * (profile.time[k + 1] - 1 - time)) : -1;
  }
  return at;
}

inline double EventOrders::stage_cost(const Profile& profile) const {
  double seconds = 0;
  for (int k = 0; k < profile.size; k++)
    if (profile.tokens[k]) seconds += job_.stage_price(profile.tokens[k]);
  return seconds / job_.step;
}

inline double EventOrders::place_all() {
  for (int k = 0; k < count_; k++) {
    after_[k + 1].copy(after_[k]);
    trial_back_[order_[k]] = place(after_[k + 1], order_[k]);
  }
  back_ = trial_back_;
  return after_[count_].end() + stage_cost(after_[count_]);
}

// Draws a change of the order, into trial_, or of a reach.
inline bool EventOrders::draw(Move& move) {
  const int a = random_.below(count_);
  if (random_.chance(p_.reach_moves)) {
    move.request = order_[a];
    move.old_reach = reach_[move.request];
    const double draw = random_.uniform();
    double& reach = reach_[move.request];
    if (draw < p_.reach_none)
      reach = 0;
    else
      reach = random_.exponential() *
              (draw < p_.reach_none + p_.reach_short ? p_.short_reach : p_.long_reach * longest_);
    move.first = move.last = a;
    trial_ = order_;
    return reach != move.old_reach;
  }
  int b = random_.below(count_);
  if (!random_.chance(p_.far_moves)) {
    const int distance = 1 + static_cast<int>(p_.near_distance * random_.exponential());
    b = std::max(0, std::min(count_ - 1, a + random_.sign() * distance));
  }
  if (a == b) return false;
  move.first = std::min(a, b);
  move.last = std::max(a, b);
  trial_ = order_;
  const auto at = trial_.begin();
  if (random_.chance(p_.swaps))
    std::swap(trial_[a], trial_[b]);
  else if (a < b)
    std::rotate(at + a, at + a + 1, at + b + 1);
  else
    std::rotate(at + b, at + a, at + a + 1);
  return true;
}

// Places again from the first change on, up to where the profile is as it was, and accepts what is good
// enough.
inline void EventOrders::attempt(const Move& move) {
  const double most = now_ + heat_ * random_.exponential();
  int done = count_;
  bool good = true;
  trial_after_[move.first].copy(after_[move.first]);
  for (int k = move.first; k < count_; k++) {
    const int request = trial_[k];
    trial_after_[k + 1].copy(trial_after_[k]);
    trial_back_[request] = place(trial_after_[k + 1], request);
    if (trial_back_[request] + job_.steps[request] > most) {
      good = false;
      break;
    }
    if (k >= move.last && trial_after_[k + 1].same(after_[k + 1])) {
      done = k + 1;
      break;
    }
  }
  if (good) {
    const Profile& last = done < count_ ? after_[count_] : trial_after_[count_];
    const double cost = last.end() + stage_cost(last);
    if (cost <= most) {
      for (int k = move.first + 1; k <= done; k++) std::swap(after_[k], trial_after_[k]);
      order_.swap(trial_);
      for (int k = move.first; k < done; k++) back_[order_[k]] = trial_back_[order_[k]];
      now_ = cost;
      keep_best(cost);
      return;
    }
  }
  if (move.request >= 0) reach_[move.request] = move.old_reach;
}

inline void EventOrders::keep_best(double cost) {
  if (cost >= best_cost_ - kTie) return;
  best_cost_ = cost;
  budget_.found(cost);
  best_back_ = back_;
  best_order_ = order_;
  best_reach_ = reach_;
}

inline void EventOrders::run() {
  now_ = place_all();
  keep_best(now_);
  int cycle = 0;
  double cycles = 1;
  bool timed = false;
  for (int64_t move = 0; !budget_.over(); move++) {
    budget_.spend();
    if (!timed && (move >= 512 || budget_.used() > 0.05)) {
      timed = true;
      cycles = std::max(1.0, std::round(budget_.moves_in_all() / (p_.cycle_moves * count_)));
    }
    if (move % 32 == 0) {
      const double through = budget_.used() * cycles;
      if (static_cast<int>(through) != cycle) {
        cycle = static_cast<int>(through);
        if (cycle % 2 == 1) {  // every second cycle begins with the best order
          order_ = best_order_;
          reach_ = best_reach_;
          now_ = place_all();
        }
      }
      const double hot = std::min(p_.hot, p_.hot_requests / count_);
      heat_ = now_ * cooled(hot, p_.cold, through - std::floor(through));
      if (move % 1024 == 0) check();
    }
    Move drawn{};
    if (draw(drawn)) attempt(drawn);
  }
}

inline double EventOrders::best(Plan& plan) const {
  int end = 0;
  for (int i = 0; i < count_; i++) end = std::max(end, best_back_[i] + job_.steps[i]);
  std::vector<int> times;
  for (int i = 0; i < count_; i++) times.push_back(plan.start[i] = end - best_back_[i] - job_.steps[i]);
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  for (int i = 0; i < count_; i++)
    plan.stage[i] =
        static_cast<int>(std::lower_bound(times.begin(), times.end(), plan.start[i]) - times.begin());
  return best_cost_;
}

// Recomputes the last profile from where requests end (debug build only).
inline void EventOrders::check() const {
#ifdef CORE_CHECKS
  const Profile& last = after_[count_];
  for (int k = 0; k < last.size; k++) {
    int held = 0, active = 0, tokens = 0;
    for (int i = 0; i < count_; i++) {
      if (back_[i] + job_.steps[i] == last.time[k]) tokens += job_.tokens[i];
      if (back_[i] > last.time[k] || back_[i] + job_.steps[i] <= last.time[k]) continue;
      active++;
      held += peak_[i] - (last.time[k] - back_[i]);
    }
    CORE_REQUIRE(held == last.held[k] && active == last.active[k] && tokens == last.tokens[k]);
    CORE_REQUIRE(held <= capacity_ && active <= job_.slots && job_.within_cap(tokens));
  }
#endif
}

}  // namespace core
