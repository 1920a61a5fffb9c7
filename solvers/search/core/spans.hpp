// Spans: stage times and one path of stages for each slot, annealed. The search where slots bind.
//
//   begin    stage     stage        stage     end          A path runs from the begin to the end through
//   slot 0  *----------*------------*---------*            stages. Each hop is a span: decode steps that the
//   slot 1  *----------------*----------------*            slot has for one request. Requests are implicit:
//           0          T1    T2     T3        R            the k-th longest takes the k-th longest span.
//
// Steps that the spans are too short for are a shortage with a price, so that walks cross infeasible paths.
// Under a KV capacity, tokens beyond it at a stage have a price, too. All prices are in decode steps.
//
// Equal replicas of a fleet stand one after another: all paths have a node at the stage with which a replica
// begins. The fleet takes as long as the longest of them.
#pragma once

#include <cstring>
#include <numeric>
#include <utility>

#include "common.hpp"

namespace core {

// Tuned values; the fields and their meaning are those of SpanParameters in parameters.py, in its order.
struct SpanParameters {
  double first_share, moves_per_request, coldest, hot_steps, hot_stages, full_heat_moves;
  double price_start, price_end_slots, price_end_least, price_end_most, price_growth, price_slack;
  double stage_bias, settle_share, settle_after;
  double memory_share, balance_share, balance_swaps, balance_points;
  double swap_tails, relocate, shift, add, restructure, restructure_slots;
  double swap_ends, new_stage, reach_swap, reach_relocate, later_stages, later_stages_requests, shift_spread;
  double widest_close, focus_width, focus_moves_least, focus_moves_most, focus_close, focus_open;
  double focus_heat, focus_shift, focus_tolerance, price_step, price_most;
};

// Adds a value to `count` numbers in a row and returns what the shortage changes by.
CORE_CLONES inline int64_t raise_lacking(int32_t* __restrict lacking, const int32_t* __restrict weight,
                                         int count) {
  int64_t change = 0;
  for (int k = 0; k < count; k++) {
    change += lacking[k] >= 0 ? weight[k] : 0;
    lacking[k]++;
  }
  return change;
}

CORE_CLONES inline int64_t lower_lacking(int32_t* __restrict lacking, const int32_t* __restrict weight,
                                         int count) {
  int64_t change = 0;
  for (int k = 0; k < count; k++) {
    change -= lacking[k] > 0 ? weight[k] : 0;
    lacking[k]--;
  }
  return change;
}

class SpanSearch {
 public:
  SpanSearch(const Job& job, const SpanParameters& parameters, const Limits& limits, uint64_t seed)
      : job_(job),
        p_(parameters),
        limits_(limits),
        budget_(limits),
        random_(seed),
        slots_(job.slots),
        count_(job.requests) {
    rank_lengths();
    price_stages();
  }

  // Spans count KV tokens, too, and may hold at most some share of the capacity.
  void hold_memory(double share) {
    memory_ = true;
    capacity_ = static_cast<int64_t>(job_.kv_capacity * share);
    int64_t sum = 0;
    for (int i = 0; i < count_; i++) sum += job_.held[i];
    mean_held_ = static_cast<int>(sum / count_);
  }

  // Begins with the paths of a schedule's slots.
  void load(const int32_t* start, const int32_t* slot, int end);
  // Searches until the limits are used up.
  void run();
  // Copies the best schedule; infinite cost if no spans ever held every request.
  double best(Plan& plan) const;
  int64_t moves() const { return budget_.moves(); }

 private:
  static constexpr int kBegin = 0, kEnd = 1;  // stages that are always there

  struct Stage {
    int time = 0;
    std::vector<int> nodes;
    int place = 0;     // in order of time
    int64_t held = 0;  // KV tokens of the spans that cross it
    int crossing = 0;  // and their number
  };
  struct Energy {
    double stages;
    int64_t shortage, excess;
    double uneven;
  };
  struct Settled {
    double cost = kNever;
    std::vector<int> start, stage, end, replica;
  };
  struct State {  // all that a walk changes
    std::vector<Stage> stages;
    std::vector<int> order, free_stages, stage_of, previous, next, place_of, free_nodes, inner, inner_place;
    std::vector<int32_t> lacking;
    int64_t shortage = 0, excess = 0;
    double stage_cost = 0;
  };

  void rank_lengths();
  void price_stages();

  int rank_of(int length) const { return length >= longest_ ? ranks_ : rank_of_length_[length]; }
  int rank(int from, int to) const { return rank_of(time(to) - time(from)); }
  int time(int stage) const { return s_.stages[stage].time; }
  int end() const { return s_.stages[kEnd].time; }

  // A span of one rank becomes one of another; rank 0 is none.
  void change(int from, int to) {
    if (to > from)
      s_.shortage += lower_lacking(&s_.lacking[from + 1], &weight_[from + 1], to - from);
    else if (to < from)
      s_.shortage += raise_lacking(&s_.lacking[to + 1], &weight_[to + 1], from - to);
  }

  Energy energy() const { return {s_.stage_cost, s_.shortage, s_.excess, uneven()}; }
  // What a walk would gain or lose from an earlier state to this one, apart from the end. The replica with spans
  // that end at some time still takes `more` steps, and so many spans.
  double delta(const Energy& before, int at = 0, double more = 0, int spans = 0) const {
    return s_.stage_cost - before.stages + more + uneven(at, more, spans) - before.uneven +
           price_ * static_cast<double>(s_.shortage - before.shortage) +
           memory_price_ * static_cast<double>(s_.excess - before.excess);
  }
  double total() const {
    return s_.stage_cost + end() + uneven() + price_ * static_cast<double>(s_.shortage) +
           memory_price_ * static_cast<double>(s_.excess);
  }
  // Stages that moves leave alone: begins of replicas, and the end.
  bool is_fixed(int stage) const { return stage < kEnd + replicas_; }
  int any_begin() { return any_of(kBegin); }
  int any_end() { return any_of(kEnd); }
  int any_of(int stage) {
    const int k = replicas_ > 1 ? random_.below(replicas_) : 0;
    return k > 0 ? kEnd + k : stage;
  }
  // The replica with the spans that end at some time.
  int replica(int at) const {
    int k = 0;
    for (int stage = kEnd + 1; stage < kEnd + replicas_; stage++) k += time(stage) < at;
    return k;
  }
  double uneven(int at = 0, double more = 0, int spans = 0) const;
  // The cost that a settled schedule of these spans will have, about, in decode steps.
  double promise() const {
    return s_.stage_cost / p_.stage_bias + end() + uneven() + 0.5 * static_cast<double>(s_.shortage) / slots_ +
           static_cast<double>(s_.excess) * steps_a_token();
  }
  // Decode steps that a KV token too many at one stage stands for.
  double steps_a_token() const {
    return memory_ ? end() / static_cast<double>(s_.order.size()) / static_cast<double>(job_.kv_capacity) : 0;
  }
  bool accept(double change) { return change <= 0 || change < heat_ * random_.exponential(); }

  // KV tokens at stages.
  int64_t beyond(const Stage& s) const { return std::max<int64_t>(0, s.held - capacity_); }
  void add_held(Stage& s, int64_t tokens, int spans) {
    s_.excess -= beyond(s);
    s.held += tokens;
    s.crossing += spans;
    s_.excess += beyond(s);
  }
  void hold_span(int from, int to, int sign);
  void hold_end(int from, int old_end, int new_end);
  void rebase(int node, int from, int to);
  void fill_held(int stage);
  void shift_held(int stage, int by);

  // Stages and nodes.
  int key(int stage) const { return 2 * time(stage) + (stage == kEnd) - (stage == kBegin); }
  void sort_in(int stage);
  bool taken(int at) const;
  int new_stage(int at);
  void drop_stage(int stage);
  void drop_if_empty(int stage) {
    if (stage > kEnd && s_.stages[stage].nodes.empty()) drop_stage(stage);
  }
  void join(int node, int stage);
  void leave(int node);
  void move_node(int node, int to);
  int new_node();
  void free_node(int node);
  void link(int from, int to) {
    s_.next[from] = to;
    s_.previous[to] = from;
  }
  bool is_alive(int node) const {
    const int at = s_.inner_place[node];
    return at < 0 || (at < static_cast<int>(s_.inner.size()) && s_.inner[at] == node);
  }
  int pick_node();
  int near_stage(int place, int reach) {
    const int at = place + random_.below(2 * reach + 1) - reach;
    return at < 0 || at >= static_cast<int>(s_.order.size()) ? -1 : s_.order[at];
  }
  int any_length() { return job_.steps[by_length_[random_.below(count_)]]; }

  // Moves: each tries one change at the present heat and takes it back if it is not accepted.
  void swap_tails();
  void relocate();
  void shift();
  void shift_one(int stage, int by);
  void shift_later(int place, int by);
  void add_node();
  void delete_node();
  void close_stage();
  void open_stage();
  void move_span_ends(int stage, int to);

  void anneal(double share);
  void improve_near();
  void draw_move(double close_or_open);
  // Swaps requests of near lengths until no stage holds more than a share of the capacity.
  void balance();
  void keep_best();
  Settled settle() const;
  double relative_length() const;
  void set_heat(double moves);
  void check() const;

  const Job& job_;
  const SpanParameters& p_;
  Limits limits_;
  Budget budget_;
  Random random_;
  int slots_, count_, replicas_ = 1;

  int ranks_ = 0, longest_ = 0;
  std::vector<int> by_length_;       // requests, longest first
  std::vector<int> rank_of_length_;  // of each length: ranks 1 to ranks_ are distinct lengths of requests
  std::vector<int32_t> weight_;      // of each rank: steps that it is longer than the one before
  double tokens_price_ = 0;          // of a request's own tokens, the same in all schedules
  std::vector<double> stage_price_;  // of a stage of so many requests, decode steps, with the bias

  State s_, saved_;
  bool memory_ = false;
  int mean_held_ = 0;
  int64_t capacity_ = 0;
  double price_ = 1, memory_price_ = 0, heat_ = 1;
  double hot_ = 1, later_ = 0;
  int focus_ = -1;  // place that moves keep near, or -1
  std::vector<std::pair<int, int>> crossing_;
  Settled best_;
};

inline void SpanSearch::rank_lengths() {
  by_length_.resize(count_);
  std::iota(by_length_.begin(), by_length_.end(), 0);
  std::sort(by_length_.begin(), by_length_.end(), [&](int a, int b) {
    return job_.steps[a] != job_.steps[b] ? job_.steps[a] > job_.steps[b] : a < b;
  });
  longest_ = job_.steps[by_length_[0]];
  std::vector<int> length = {0};
  for (int k = count_ - 1; k >= 0; k--)
    if (job_.steps[by_length_[k]] > length.back()) length.push_back(job_.steps[by_length_[k]]);
  ranks_ = static_cast<int>(length.size()) - 1;
  weight_.assign(ranks_ + 1, 0);
  for (int k = 1; k <= ranks_; k++) weight_[k] = length[k] - length[k - 1];
  rank_of_length_.assign(longest_ + 1, 0);
  for (int at = 0, k = 1; at <= longest_; at++) {
    while (k <= ranks_ && length[k] <= at) k++;
    rank_of_length_[at] = k - 1;
  }
  s_.lacking.assign(ranks_ + 2, 0);
  for (int i = 0; i < count_; i++) s_.lacking[rank_of_length_[job_.steps[i]]]++;
  for (int k = ranks_ - 1; k >= 1; k--) s_.lacking[k] += s_.lacking[k + 1];
  s_.lacking[0] = 0;
  for (int k = 1; k <= ranks_; k++) s_.shortage += static_cast<int64_t>(weight_[k]) * s_.lacking[k];
}

// A stage of k requests costs as many stages of mean prompts as take least.
inline void SpanSearch::price_stages() {
  double tokens = 0;
  for (int i = 0; i < count_; i++) tokens += job_.tokens[i];
  const double mean = tokens / count_;
  tokens_price_ = job_.per_token * mean / job_.step;
  stage_price_.assign(std::min(count_, slots_) + 2, 0.0);
  double parts = 1;
  for (size_t k = 1; k < stage_price_.size(); k++) {
    const double all = mean * static_cast<double>(k);
    if (job_.token_cap > 0) parts = std::max(parts, std::ceil(all / static_cast<double>(job_.token_cap)));
    auto price = [&](double m) { return m * job_.stage_price(all / m); };
    while (parts < static_cast<double>(k) && price(parts + 1) < price(parts)) parts++;
    stage_price_[k] = p_.stage_bias * price(parts) / job_.step;
  }
}

// Steps that replicas could take longer without the fleet's doing so.
inline double SpanSearch::uneven(int at, double more, int spans) const {
  if (replicas_ == 1) return 0;
  const int longer = at > 0 ? replica(at) : -1;
  double longest = 0, stages = 0;
  for (int k = 0, number = 0, begin = 0, last = static_cast<int>(s_.order.size()); k < last; k++) {
    const int id = s_.order[k];
    if (id != kBegin && is_fixed(id)) {
      const double took = stages + time(id) - begin + (number == longer ? more + spans * tokens_price_ : 0);
      longest = std::max(longest, took);
      stages = 0;
      begin = time(id);
      number++;
    }
    const size_t nodes = s_.stages[id].nodes.size();
    if (id != kEnd) stages += stage_price_[nodes] + static_cast<double>(nodes) * tokens_price_;
  }
  return replicas_ * longest - s_.stage_cost - end() - more;
}

// ---- KV tokens
// ----------------------------------------------------------------------------------------------

inline void SpanSearch::hold_span(int from, int to, int sign) {
  if (!memory_) return;
  for (int k = s_.stages[from].place + 1, last = s_.stages[to].place; k <= last; k++) {
    Stage& s = s_.stages[s_.order[k]];
    add_held(s, sign * static_cast<int64_t>(mean_held_ + s.time - time(from)), sign);
  }
}

// A span that begins at `from` ends at another stage.
inline void SpanSearch::hold_end(int from, int old_end, int new_end) {
  if (!memory_) return;
  const int a = s_.stages[old_end].place, b = s_.stages[new_end].place, sign = b > a ? 1 : -1;
  for (int k = std::min(a, b) + 1; k <= std::max(a, b); k++) {
    Stage& s = s_.stages[s_.order[k]];
    add_held(s, sign * static_cast<int64_t>(mean_held_ + s.time - time(from)), sign);
  }
}

// The two spans at a node when it moves from one stage to another.
inline void SpanSearch::rebase(int node, int from, int to) {
  if (!memory_) return;
  const int before = s_.stage_of[s_.previous[node]], after = s_.stage_of[s_.next[node]];
  hold_span(from, after, -1);
  hold_end(before, from, to);
  hold_span(to, after, 1);
}

inline void SpanSearch::fill_held(int stage) {
  if (!memory_) return;
  Stage& s = s_.stages[stage];
  s.held = 0;
  s.crossing = 0;
  for (int k = 0; k < s.place; k++)
    for (int node : s_.stages[s_.order[k]].nodes)
      if (s_.next[node] >= 0 && time(s_.stage_of[s_.next[node]]) >= s.time) {
        s.crossing++;
        s.held += mean_held_ + s.time - time(s_.order[k]);
      }
  s_.excess += beyond(s);
}

inline void SpanSearch::shift_held(int stage, int by) {
  if (!memory_) return;
  Stage& shifted = s_.stages[stage];
  add_held(shifted, static_cast<int64_t>(by) * shifted.crossing, 0);
  if (stage == kEnd) return;
  for (int node : shifted.nodes)
    for (int k = shifted.place + 1, last = s_.stages[s_.stage_of[s_.next[node]]].place; k <= last; k++)
      add_held(s_.stages[s_.order[k]], -by, 0);
}

// ---- Stages and nodes
// ---------------------------------------------------------------------------------------

inline void SpanSearch::sort_in(int stage) {
  int k = s_.stages[stage].place;
  const int last = static_cast<int>(s_.order.size()) - 1;
  auto move_to = [&](int from, int to) {
    s_.order[to] = s_.order[from];
    s_.stages[s_.order[to]].place = to;
  };
  for (; k > 0 && key(s_.order[k - 1]) > key(stage); k--) move_to(k - 1, k);
  for (; k < last && key(s_.order[k + 1]) < key(stage); k++) move_to(k + 1, k);
  s_.order[k] = stage;
  s_.stages[stage].place = k;
}

// Whether a stage lies at this time already; equal times would make the held tokens ambiguous.
inline bool SpanSearch::taken(int at) const {
  if (!memory_) return false;
  const auto it = std::lower_bound(s_.order.begin(), s_.order.end(), at,
                                   [&](int stage, int when) { return time(stage) < when; });
  return it != s_.order.end() && time(*it) == at;
}

inline int SpanSearch::new_stage(int at) {
  int id;
  if (s_.free_stages.empty()) {
    id = static_cast<int>(s_.stages.size());
    s_.stages.emplace_back();
  } else {
    id = s_.free_stages.back();
    s_.free_stages.pop_back();
  }
  Stage& s = s_.stages[id];
  s.time = at;
  s.nodes.clear();
  // In the order it goes straight to its place.
  const auto it = std::lower_bound(s_.order.begin(), s_.order.end(), 2 * at,
                                   [&](int stage, int k) { return key(stage) < k; });
  s.place = static_cast<int>(it - s_.order.begin());
  s_.order.insert(it, id);
  for (size_t k = s.place + 1; k < s_.order.size(); k++) s_.stages[s_.order[k]].place = static_cast<int>(k);
  s.held = 0;
  s.crossing = 0;
  fill_held(id);
  return id;
}

inline void SpanSearch::drop_stage(int stage) {
  if (memory_) s_.excess -= beyond(s_.stages[stage]);
  int k = s_.stages[stage].place;
  s_.order.erase(s_.order.begin() + k);
  for (; k < static_cast<int>(s_.order.size()); k++) s_.stages[s_.order[k]].place = k;
  s_.free_stages.push_back(stage);
}

inline void SpanSearch::join(int node, int stage) {
  Stage& s = s_.stages[stage];
  s_.place_of[node] = static_cast<int>(s.nodes.size());
  s.nodes.push_back(node);
  s_.stage_of[node] = stage;
  const size_t k = s.nodes.size();
  if (stage != kEnd) s_.stage_cost += stage_price_[k] - stage_price_[k - 1];
}

inline void SpanSearch::leave(int node) {
  const int stage = s_.stage_of[node];
  Stage& s = s_.stages[stage];
  const int last = s.nodes.back();
  s.nodes[s_.place_of[node]] = last;
  s_.place_of[last] = s_.place_of[node];
  s.nodes.pop_back();
  const size_t k = s.nodes.size();
  if (stage != kEnd) s_.stage_cost += stage_price_[k] - stage_price_[k + 1];
}

// Moves a node to another stage, with its two spans.
inline void SpanSearch::move_node(int node, int to) {
  const int from = s_.stage_of[node];
  const int before = s_.stage_of[s_.previous[node]], after = s_.stage_of[s_.next[node]];
  rebase(node, from, to);
  leave(node);
  join(node, to);
  change(rank(before, from), rank(before, to));
  change(rank(from, after), rank(to, after));
}

inline int SpanSearch::new_node() {
  int node;
  if (s_.free_nodes.empty()) {
    node = static_cast<int>(s_.stage_of.size());
    for (auto* column : {&s_.stage_of, &s_.place_of, &s_.inner_place}) column->push_back(0);
    for (auto* column : {&s_.previous, &s_.next}) column->push_back(-1);
  } else {
    node = s_.free_nodes.back();
    s_.free_nodes.pop_back();
  }
  s_.inner_place[node] = static_cast<int>(s_.inner.size());
  s_.inner.push_back(node);
  return node;
}

inline void SpanSearch::free_node(int node) {
  const int at = s_.inner_place[node], last = s_.inner.back();
  s_.inner[at] = last;
  s_.inner_place[last] = at;
  s_.inner.pop_back();
  s_.free_nodes.push_back(node);
}

// A node within the paths, near the focus if there is one.
inline int SpanSearch::pick_node() {
  const int width = static_cast<int>(p_.focus_width);
  for (int attempt = 0; focus_ >= 0 && attempt < 4; attempt++) {
    const int stage = near_stage(focus_, width);
    if (stage < 0 || is_fixed(stage) || s_.stages[stage].nodes.empty()) continue;
    return s_.stages[stage].nodes[random_.below(static_cast<int>(s_.stages[stage].nodes.size()))];
  }
  return s_.inner[random_.below(static_cast<int>(s_.inner.size()))];
}

inline void SpanSearch::load(const int32_t* start, const int32_t* slot, int end) {
  s_.stages.resize(2);
  s_.stages[kEnd].time = end;
  s_.stages[kEnd].place = 1;
  s_.order = {kBegin, kEnd};
  std::vector<int> times(start, start + count_);
  std::sort(times.begin(), times.end());
  times.erase(std::unique(times.begin(), times.end()), times.end());
  std::vector<int> stage_at;
  const bool memory = std::exchange(memory_, false);  // held tokens are filled in at the end
  replicas_ = 1 + *std::max_element(slot, slot + count_) / slots_;
  std::vector<int> begins(replicas_ + 1, end);
  for (int i = 0; i < count_; i++) begins[slot[i] / slots_] = std::min(begins[slot[i] / slots_], start[i]);
  for (int k = 1; k < replicas_; k++) new_stage(begins[k]);
  for (int at : times) {
    const int k = static_cast<int>(std::find(begins.begin(), begins.end(), at) - begins.begin());
    stage_at.push_back(at == 0 ? kBegin : k < replicas_ ? kEnd + k : new_stage(at));
  }
  std::vector<std::vector<int>> of_slot(slots_);
  for (int i = 0; i < count_; i++) of_slot[slot[i] % slots_].push_back(i);
  std::vector<int64_t> spans(ranks_ + 2, 0);
  auto outer_node = [&](int stage) {
    const int node = new_node();
    s_.inner.pop_back();
    s_.inner_place[node] = -1;
    join(node, stage);
    return node;
  };
  for (auto& requests : of_slot) {
    std::sort(requests.begin(), requests.end(), [&](int a, int b) { return start[a] < start[b]; });
    int last = outer_node(kBegin);
    auto hop = [&](int node) {
      spans[rank(s_.stage_of[last], s_.stage_of[node])]++;
      link(last, node);
      last = node;
    };
    int number = 1;
    auto begin_replicas = [&](int at) {
      for (; number < replicas_ && begins[number] <= at; number++) hop(outer_node(kEnd + number));
    };
    for (int i : requests) {
      begin_replicas(start[i]);
      if (start[i] == begins[number - 1]) continue;
      const int node = new_node();
      join(node, stage_at[std::lower_bound(times.begin(), times.end(), start[i]) - times.begin()]);
      hop(node);
    }
    begin_replicas(end);
    hop(outer_node(kEnd));
    s_.next[last] = -1;
  }
  s_.shortage = 0;
  for (int k = ranks_; k >= 1; k--) {
    spans[k] += spans[k + 1];
    s_.lacking[k] -= static_cast<int32_t>(spans[k]);
    s_.shortage += static_cast<int64_t>(weight_[k]) * std::max<int64_t>(0, s_.lacking[k]);
  }
  memory_ = memory;
  for (size_t k = 1; k < s_.order.size(); k++) fill_held(s_.order[k]);
  check();
}

// ---- Moves
// --------------------------------------------------------------------------------------------------

//  *-----u---v---*        *-----u   v---*      Two paths exchange what follows a node of each, where both
//  *---x---y-----*   ->   *---x---y \---*      nodes lie near each other: u goes on to y and x to v.
inline void SpanSearch::swap_tails() {
  if (s_.inner.empty()) return;
  int v = pick_node();
  if (random_.chance(p_.swap_ends)) v = s_.stages[any_end()].nodes[random_.below(slots_)];
  const int near = near_stage(s_.stages[s_.stage_of[v]].place, static_cast<int>(p_.reach_swap));
  if (near <= kBegin || s_.stages[near].nodes.empty()) return;
  const int y = s_.stages[near].nodes[random_.below(static_cast<int>(s_.stages[near].nodes.size()))];
  if (y == v) return;
  const int u = s_.previous[v], x = s_.previous[y];
  const int at_u = s_.stage_of[u], at_v = s_.stage_of[v], at_x = s_.stage_of[x], at_y = s_.stage_of[y];
  if (at_v == at_y || at_u == at_x || u == y || x == v) return;
  if (time(at_y) <= time(at_u) || time(at_v) <= time(at_x)) return;
  if (replica(time(at_v)) != replica(time(at_y))) return;
  const int uv = rank(at_u, at_v), xy = rank(at_x, at_y), uy = rank(at_u, at_y), xv = rank(at_x, at_v);
  const Energy before = energy();
  change(uv, uy);
  change(xy, xv);
  hold_end(at_u, at_v, at_y);
  hold_end(at_x, at_y, at_v);
  if (accept(delta(before))) {
    link(u, y);
    link(x, v);
    return;
  }
  change(uy, uv);
  change(xv, xy);
  hold_end(at_u, at_y, at_v);
  hold_end(at_x, at_v, at_y);
}

//  *---u-------*    *-----u-----*      A node goes to a stage near its own, or to a new one whose time
//      |        ->        |            is drawn or makes one of its spans as long as some request.
inline void SpanSearch::relocate() {
  if (s_.inner.empty()) return;
  const int node = pick_node(), from = s_.stage_of[node];
  const int before = s_.stage_of[s_.previous[node]], after = s_.stage_of[s_.next[node]];
  int to;
  bool fresh = false;
  if (random_.chance(p_.new_stage / 2)) {
    int at = time(from) +
             random_.sign() * (1 + static_cast<int>(std::exp(p_.shift_spread * random_.normal() + 1)));
    if (random_.chance(0.5)) {
      const int length = any_length();
      at = random_.chance(0.5) ? time(before) + length : time(after) - length;
    }
    if (at <= time(before) || at >= time(after) || taken(at)) return;
    to = new_stage(at);
    fresh = true;
  } else {
    to = near_stage(s_.stages[from].place, static_cast<int>(p_.reach_relocate));
    if (to < 0 || is_fixed(to) || to == from || time(to) <= time(before) || time(to) >= time(after)) return;
  }
  const Energy earlier = energy();
  move_node(node, to);
  if (accept(delta(earlier))) {
    drop_if_empty(from);
    return;
  }
  move_node(node, from);
  if (fresh) drop_stage(to);
}

// A stage, or it and all later ones, happens some steps earlier or later.
inline void SpanSearch::shift() {
  const int stages = static_cast<int>(s_.order.size());
  int place = 1 + random_.below(stages - 1);
  const int width = static_cast<int>(p_.focus_width);
  if (focus_ >= 0) place = std::min(stages - 1, std::max(1, focus_ + random_.below(2 * width + 1) - width));
  int by = 1 + static_cast<int>(std::exp(p_.shift_spread * random_.normal() + 0.3));
  if (random_.chance(0.5)) by = -by;
  if (random_.chance(later_))
    shift_later(place, by);
  else
    shift_one(s_.order[place], by);
}

// All spans at a stage as if it were at another time.
inline void SpanSearch::move_span_ends(int stage, int to) {
  const int old = time(stage);
  for (int node : s_.stages[stage].nodes) {
    const int before = time(s_.stage_of[s_.previous[node]]);
    change(rank_of(old - before), rank_of(to - before));
    if (stage == kEnd) continue;
    const int after = time(s_.stage_of[s_.next[node]]);
    change(rank_of(after - old), rank_of(after - to));
  }
  s_.stages[stage].time = to;
}

inline void SpanSearch::shift_one(int stage, int by) {
  Stage& s = s_.stages[stage];
  const int old = s.time, to = old + by, place = s.place;
  if (to <= 0 || (stage != kEnd && to >= end())) return;
  if (memory_) {  // held tokens are kept in order of time
    if (to <= time(s_.order[place - 1])) return;
    if (place + 1 < static_cast<int>(s_.order.size()) && to >= time(s_.order[place + 1])) return;
  }
  for (int node : s.nodes) {
    if (time(s_.stage_of[s_.previous[node]]) >= to) return;
    if (stage != kEnd && time(s_.stage_of[s_.next[node]]) <= to) return;
  }
  const Energy before = energy();
  move_span_ends(stage, to);
  shift_held(stage, by);
  if (accept(delta(before) + (stage == kEnd ? by : 0))) {
    sort_in(stage);
    return;
  }
  move_span_ends(stage, old);
  shift_held(stage, -by);
}

inline void SpanSearch::shift_later(int place, int by) {
  if (by < 0 && time(s_.order[place - 1]) >= time(s_.order[place]) + by) return;
  crossing_.clear();
  for (int k = 0; k < place; k++)
    for (int node : s_.stages[s_.order[k]].nodes)
      if (s_.next[node] >= 0 && s_.stages[s_.stage_of[s_.next[node]]].place >= place)
        crossing_.push_back({node, s_.next[node]});
  auto lengthen = [&](int steps, int from) {  // crossing spans, longer than now by `from`, by some steps more
    for (const auto& [u, v] : crossing_) {
      const int length = time(s_.stage_of[v]) - time(s_.stage_of[u]) + from;
      change(rank_of(length), rank_of(length + steps));
      if (!memory_) continue;
      for (int k = place, last = s_.stages[s_.stage_of[v]].place; k <= last; k++)
        add_held(s_.stages[s_.order[k]], steps, 0);
    }
  };
  const Energy before = energy();
  lengthen(by, 0);
  if (accept(delta(before, time(s_.order[place]), by)))
    for (size_t k = place; k < s_.order.size(); k++) s_.stages[s_.order[k]].time += by;
  else
    lengthen(-by, by);
}

//  *-----------*   ->   *----n------*      A span becomes two, at a stage within it or at a new one.
inline void SpanSearch::add_node() {
  const bool at_begin =
      s_.inner.empty() ||
      random_.chance(static_cast<double>(slots_ * replicas_) / (slots_ * replicas_ + s_.inner.size()));
  const int u = at_begin ? s_.stages[any_begin()].nodes[random_.below(slots_)] : pick_node();
  const int v = s_.next[u], from = s_.stage_of[u], to = s_.stage_of[v];
  const int first = s_.stages[from].place, last = s_.stages[to].place;
  // Without new stages a walk could never leave paths of one stage alone.
  const bool fresh = last - first < 2 || random_.chance(p_.new_stage);
  int stage;
  if (fresh) {
    const int length = any_length(), at = random_.chance(0.5) ? time(from) + length : time(to) - length;
    if (at <= time(from) || at >= time(to) || taken(at)) return;
    stage = new_stage(at);
  } else {
    stage = s_.order[first + 1 + random_.below(last - first - 1)];
    if (is_fixed(stage) || time(stage) <= time(from) || time(stage) >= time(to)) return;
  }
  const Energy before = energy();
  const int whole = rank(from, to), left = rank(from, stage), right = rank(stage, to);
  change(whole, left);
  change(0, right);
  hold_end(from, to, stage);
  hold_span(stage, to, 1);
  const size_t k = s_.stages[stage].nodes.size();
  if (accept(delta(before, time(stage), stage_price_[k + 1] - stage_price_[k], 1))) {
    const int node = new_node();
    join(node, stage);
    link(u, node);
    link(node, v);
    return;
  }
  change(left, whole);
  change(right, 0);
  hold_span(stage, to, -1);
  hold_end(from, stage, to);
  if (fresh) drop_stage(stage);
}

//  *----n------*   ->   *-----------*      Two spans become one.
inline void SpanSearch::delete_node() {
  if (s_.inner.empty()) return;
  const int node = pick_node(), u = s_.previous[node], v = s_.next[node];
  const int from = s_.stage_of[u], stage = s_.stage_of[node], to = s_.stage_of[v];
  const int whole = rank(from, to), left = rank(from, stage), right = rank(stage, to);
  const Energy before = energy();
  change(left, whole);
  change(right, 0);
  hold_span(stage, to, -1);
  hold_end(from, stage, to);
  const size_t k = s_.stages[stage].nodes.size();
  if (accept(delta(before, time(stage), stage_price_[k - 1] - stage_price_[k], -1))) {
    leave(node);
    drop_if_empty(stage);
    link(u, v);
    free_node(node);
    return;
  }
  change(whole, left);
  change(0, right);
  hold_end(from, to, stage);
  hold_span(stage, to, 1);
}

// A stage is given up: each of its nodes goes to the stage near it that leaves the least shortage.
inline void SpanSearch::close_stage() {
  const int stages = static_cast<int>(s_.order.size()), reach = static_cast<int>(p_.reach_relocate);
  if (stages < 4) return;
  const int place = focus_ >= 0 ? focus_ : 1 + random_.below(stages - 1);
  if (place >= stages || is_fixed(s_.order[place])) return;
  const int stage = s_.order[place];
  const std::vector<int> nodes = s_.stages[stage].nodes;
  if (focus_ < 0 && static_cast<double>(nodes.size()) > p_.widest_close) return;
  const Energy before = energy();
  size_t moved = 0;
  for (int node : nodes) {
    const int from = s_.stage_of[s_.previous[node]], to = s_.stage_of[s_.next[node]];
    const int left = rank(from, stage), right = rank(stage, to);
    int chosen = -1;
    double least = kNever;
    for (int k = std::max(0, place - reach); k <= std::min(stages - 1, place + reach); k++) {
      const int other = s_.order[k];
      if (other == stage || is_fixed(other) || time(other) <= time(from) || time(other) >= time(to)) continue;
      const int64_t shortage = s_.shortage;
      change(left, rank(from, other));
      change(right, rank(other, to));
      const double score = static_cast<double>(s_.shortage - shortage) + 0.5 * random_.uniform();
      change(rank(from, other), left);
      change(rank(other, to), right);
      if (score < least) least = score, chosen = other;
    }
    if (chosen < 0) break;
    move_node(node, chosen);
    moved++;
  }
  const double held = memory_ ? memory_price_ * static_cast<double>(beyond(s_.stages[stage])) : 0;
  if (moved == nodes.size() && accept(delta(before) - held)) {
    drop_stage(stage);
    return;
  }
  while (moved > 0) move_node(nodes[--moved], stage);
}

// A new stage takes the nodes of the stages near it that leave a smaller shortage there.
inline void SpanSearch::open_stage() {
  const int stages = static_cast<int>(s_.order.size()), reach = static_cast<int>(p_.reach_relocate);
  const int after = focus_ >= 0 && focus_ < stages - 1 ? focus_ : random_.below(stages - 1);
  const int low = time(s_.order[after]), high = time(s_.order[after + 1]);
  if (high - low < 2) return;
  const Energy before = energy();
  const int stage = new_stage(low + 1 + random_.below(high - low - 1)), place = s_.stages[stage].place;
  std::vector<std::pair<int, int>> moved;  // node, and its stage before
  for (int k = std::max(0, place - reach); k <= std::min(stages, place + reach); k++) {
    const int other = s_.order[k];
    if (other == stage || is_fixed(other)) continue;
    const std::vector<int> nodes = s_.stages[other].nodes;
    for (int node : nodes) {
      const int from = s_.stage_of[s_.previous[node]], to = s_.stage_of[s_.next[node]];
      if (time(from) >= time(stage) || time(to) <= time(stage)) continue;
      const int64_t shortage = s_.shortage;
      move_node(node, stage);
      if (s_.shortage < shortage || (s_.shortage == shortage && random_.chance(0.3)))
        moved.push_back({node, other});
      else
        move_node(node, other);
    }
  }
  if (!moved.empty() && accept(delta(before))) {
    std::vector<int> others;
    for (const auto& [node, other] : moved) others.push_back(other);
    std::sort(others.begin(), others.end());
    others.erase(std::unique(others.begin(), others.end()), others.end());
    for (int other : others) drop_if_empty(other);
    return;
  }
  for (size_t k = moved.size(); k-- > 0;) move_node(moved[k].first, moved[k].second);
  drop_stage(stage);
}

// ---- Schedules
// ----------------------------------------------------------------------------------------------

// The schedule of the present spans: the longest request in the longest span, all stages as early as can be.
inline SpanSearch::Settled SpanSearch::settle() const {
  struct Span {
    int length, from, to;
  };
  Settled made;
  std::vector<Span> spans;
  for (size_t u = 0; u < s_.stage_of.size(); u++)
    if (is_alive(static_cast<int>(u)) && s_.next[u] >= 0) {
      const int from = s_.stage_of[u], to = s_.stage_of[s_.next[u]];
      spans.push_back({time(to) - time(from), from, to});
    }
  if (static_cast<int>(spans.size()) < count_) return made;
  std::sort(spans.begin(), spans.end(), [&](const Span& a, const Span& b) {
    return a.length != b.length ? a.length > b.length : s_.stages[a.from].place < s_.stages[b.from].place;
  });
  std::vector<std::vector<std::pair<int, int>>> into(s_.order.size());  // stage before, steps between
  for (int k = 0; k < count_; k++)
    into[s_.stages[spans[k].to].place].push_back({spans[k].from, job_.steps[by_length_[k]]});
  std::vector<int> when(s_.stages.size(), 0), members(s_.stages.size(), 0);
  int last = 0;
  for (size_t k = 1; k < s_.order.size(); k++) {
    for (const auto& [from, steps] : into[k]) last = std::max(last, when[from] + steps);
    when[s_.order[k]] = last;
  }
  made.start.resize(count_);
  made.stage.resize(count_);
  made.end.resize(count_);
  made.replica.resize(count_);
  std::vector<int> begins = {0};  // places of the replicas' first stages, and their times
  for (size_t k = 1; k < s_.order.size(); k++)
    if (is_fixed(s_.order[k])) begins.push_back(static_cast<int>(k));
  for (int k = 0; k < count_; k++) {
    const int i = by_length_[k];
    made.start[i] = when[spans[k].from];
    made.end[i] = when[spans[k].to];
    made.stage[i] = s_.stages[spans[k].from].place;
    while (begins[made.replica[i] + 1] <= made.stage[i]) made.replica[i]++;
    members[spans[k].from]++;
  }
  made.cost = 0;
  std::vector<double> own(replicas_, 0);
  for (int i = 0; i < count_ && replicas_ > 1; i++) own[made.replica[i]] += job_.per_token * job_.tokens[i] / job_.step;
  for (int k = 0; k < replicas_; k++) {
    double took = own[k] + when[s_.order[begins[k + 1]]] - when[s_.order[begins[k]]];
    for (int place = begins[k]; place < begins[k + 1]; place++)
      took += stage_price_[members[s_.order[place]]] / p_.stage_bias;
    made.cost = std::max(made.cost, replicas_ * took);
  }
  return made;
}

inline void SpanSearch::keep_best() {
  Settled made = settle();
  made.cost += static_cast<double>(s_.excess) * steps_a_token();
  if (made.cost < best_.cost - kTie) best_ = std::move(made);
  budget_.found(best_.cost);
}

inline double SpanSearch::best(Plan& plan) const {
  if (best_.start.empty()) return kNever;
  std::copy(best_.start.begin(), best_.start.end(), plan.start);
  std::copy(best_.stage.begin(), best_.stage.end(), plan.stage);
  std::copy(best_.replica.begin(), best_.replica.end(), plan.slot);
  return best_.cost;
}

inline void SpanSearch::balance() {
  if (!memory_ || best_.start.empty()) return;
  auto& start = best_.start;
  // Memory is looked at before each stage and at points between, where requests end while others grow.
  std::vector<int> looked(start);
  int last = 0;
  for (int i = 0; i < count_; i++) last = std::max(last, start[i] + job_.steps[i]);
  const int points = static_cast<int>(p_.balance_points);
  for (int k = 1; k <= points; k++)
    looked.push_back(static_cast<int>(static_cast<int64_t>(last) * k / points));
  std::sort(looked.begin(), looked.end());
  looked.erase(std::unique(looked.begin(), looked.end()), looked.end());
  const double most = static_cast<double>(job_.kv_capacity) * p_.balance_share;
  std::vector<double> held(looked.size(), 0);
  double excess = 0;
  auto add = [&](int i, int at, int sign) {
    size_t k = std::upper_bound(looked.begin(), looked.end(), at) - looked.begin();
    for (; k < looked.size() && looked[k] <= at + job_.steps[i]; k++) {
      excess -= std::max(0.0, held[k] - most);
      held[k] += sign * (job_.held[i] + looked[k] - 1 - at);
      excess += std::max(0.0, held[k] - most);
    }
  };
  for (int i = 0; i < count_; i++) add(i, start[i], 1);
  for (int64_t left = static_cast<int64_t>(p_.balance_swaps * count_); left > 0 && excess > 0; left--) {
    const int a = random_.below(count_), b = a + 1 + random_.below(1 + count_ / 8);
    if (b >= count_) continue;
    const int i = by_length_[a], j = by_length_[b];
    if (start[i] == start[j] || job_.steps[i] > best_.end[j] - start[j] ||
        job_.steps[j] > best_.end[i] - start[i])
      continue;
    const double before = excess;
    auto swap_starts = [&] {
      add(i, start[i], -1);
      add(j, start[j], -1);
      std::swap(start[i], start[j]);
      std::swap(best_.stage[i], best_.stage[j]);
      std::swap(best_.end[i], best_.end[j]);
      add(i, start[i], 1);
      add(j, start[j], 1);
    };
    swap_starts();
    if (excess > before) swap_starts();
  }
}

// ---- The walk
// -----------------------------------------------------------------------------------------------

// How much longer the job must be than its work over the slots.
inline double SpanSearch::relative_length() const {
  double work = 0, held = 0;
  for (int i = 0; i < count_; i++) {
    work += job_.steps[i];
    held += job_.steps[i] * (job_.held[i] + job_.steps[i] / 2.0);
  }
  const double least = std::max(memory_ ? held / static_cast<double>(capacity_) : 0.0, 1.0 * longest_ * replicas_);
  return std::max(1.0, p_.price_slack * least / (work / slots_));
}

// A walk of few moves a request begins colder, as it could not cool what it has melted.
inline void SpanSearch::set_heat(double moves) {
  const double share = std::min(1.0, moves / count_ / p_.full_heat_moves), stage = stage_price_[1];
  hot_ = std::max(p_.coldest, p_.hot_steps * share + p_.hot_stages * stage * std::sqrt(share));
}

// Draws one move; `close_or_open`: share of moves that close a stage, and as many that open one.
inline void SpanSearch::draw_move(double close_or_open) {
  double draw = random_.uniform();
  if ((draw -= p_.swap_tails) < 0) return swap_tails();
  if ((draw -= p_.relocate) < 0) return relocate();
  if ((draw -= p_.shift) < 0) return shift();
  if ((draw -= p_.add) < 0) return add_node();
  if ((draw -= close_or_open) < 0) return close_stage();
  if ((draw -= close_or_open) < 0) return open_stage();
  delete_node();
}

// Anneals everything, once or in cycles, for a share of the limits.
inline void SpanSearch::anneal(double share) {
  const double relative = relative_length(), stage = stage_price_[1];
  const double price_start = relative * p_.price_start * (1 + p_.hot_stages * stage) / slots_;
  const double price_end = std::max(
      price_start,
      relative * std::min(p_.price_end_most, std::max(p_.price_end_least, p_.price_end_slots / slots_)));
  const double heavy = std::min(p_.restructure, p_.restructure_slots / slots_);
  later_ = std::min(p_.later_stages, p_.later_stages_requests / count_);
  double spent = 0, last = kNever, cycles = 1;
  bool timed = false;
  constexpr int64_t kTimed = 4096, kCooling = 32;  // moves before the pace is known; moves at one heat
  set_heat(share * budget_.moves_in_all());
  for (int64_t move = 0; budget_.used() < share; move++) {
    budget_.spend();
    if (!timed && budget_.moves() >= kTimed) {
      timed = true;
      const double moves = share * budget_.moves_in_all();
      cycles = std::max(1.0, std::round(moves / (p_.moves_per_request * count_)));
      set_heat(moves / cycles);
    }
    if (move % kCooling == 0) {
      const double through = budget_.used() / share * cycles, done = through - std::floor(through);
      heat_ = cooled(hot_, p_.coldest, done);
      price_ = price_start * std::pow(price_end / price_start, std::pow(done, p_.price_growth));
      memory_price_ = price_ * slots_ * steps_a_token();
      const double promised = promise();
      if (promised < best_.cost - kTie && promised != last && done > p_.settle_after &&
          spent < p_.settle_share * budget_.used()) {
        const double before = budget_.used_now();
        last = promised;
        keep_best();
        budget_.spend(count_ / 4 + 1);
        spent += budget_.used_now() - before;
      }
      if (move % (kCooling * 64) == 0) check();
    }
    draw_move(heavy);
  }
  keep_best();
  price_ = price_end;
}

// Closes or opens one stage at a time, anneals what is near, and takes it all back where that does not pay.
inline void SpanSearch::improve_near() {
  const double most_price = p_.price_most * relative_length(), width = p_.focus_width;
  const double hot = p_.focus_heat * (p_.hot_steps + p_.hot_stages * stage_price_[1]);
  const double near = 2.0 * width * 8 * count_ / static_cast<double>(s_.order.size());
  const int moves = static_cast<int>(std::min(p_.focus_moves_most, p_.focus_moves_least + near));
  later_ = p_.focus_shift;
  memory_price_ = price_ * slots_ * steps_a_token();
  while (s_.order.size() > 3 && !budget_.over()) {
    // Walks that end with spans lacking would never yield a schedule at the old price.
    if (s_.shortage > 0) price_ = std::min(p_.price_step * price_, most_price);
    saved_ = s_;
    const double earlier = total();
    focus_ = 1 + random_.below(static_cast<int>(s_.order.size()) - 2);
    const double kind = random_.uniform();
    heat_ = kNever;
    if (kind < p_.focus_close)
      close_stage();
    else if (kind < p_.focus_close + p_.focus_open)
      open_stage();
    const double begin = kind < p_.focus_close + p_.focus_open ? hot : 2 * hot;
    for (int k = 0; k < moves && !budget_.over(); k++) {
      heat_ = cooled(begin, p_.coldest, k / static_cast<double>(moves));
      budget_.spend();
      draw_move(0);
    }
    focus_ = -1;
    check();
    const double later = total();
    if (later > earlier + p_.focus_tolerance * p_.coldest * random_.exponential())
      s_ = saved_;
    else if (later < earlier - kTie && promise() < best_.cost - kTie)
      keep_best();
  }
}

inline void SpanSearch::run() {
  keep_best();
  anneal(p_.first_share);
  improve_near();
  keep_best();
  balance();
}

// Recomputes what is kept up to date move by move (debug build only).
inline void SpanSearch::check() const {
#ifdef CORE_CHECKS
  std::vector<int64_t> lacking(ranks_ + 2, 0);
  for (int i = 0; i < count_; i++) lacking[rank_of(job_.steps[i])]++;
  double stage_cost = 0;
  int64_t shortage = 0, excess = 0;
  for (size_t k = 0; k < s_.order.size(); k++) {
    const int id = s_.order[k];
    const Stage& s = s_.stages[id];
    CORE_REQUIRE(s.place == static_cast<int>(k));
    CORE_REQUIRE(k == 0 || time(s_.order[k - 1]) <= s.time);
    CORE_REQUIRE(!is_fixed(id) || static_cast<int>(s.nodes.size()) == slots_);
    if (id != kEnd) stage_cost += stage_price_[s.nodes.size()];
    int64_t held = 0;
    for (size_t q = 0; q < k && memory_; q++)
      for (int node : s_.stages[s_.order[q]].nodes)
        if (s_.stages[s_.stage_of[s_.next[node]]].place >= s.place)
          held += mean_held_ + s.time - time(s_.order[q]);
    CORE_REQUIRE(!memory_ || held == s.held);
    if (memory_ && k > 0) excess += beyond(s);
    for (int node : s.nodes) {
      CORE_REQUIRE(s_.stage_of[node] == id);
      if (s_.next[node] < 0) continue;
      CORE_REQUIRE(s_.previous[s_.next[node]] == node);
      CORE_REQUIRE(time(s_.stage_of[s_.next[node]]) > s.time);
      lacking[rank(id, s_.stage_of[s_.next[node]])]--;
    }
  }
  for (int k = ranks_; k >= 1; k--) {
    lacking[k] += lacking[k + 1];
    CORE_REQUIRE(lacking[k] == s_.lacking[k]);
    shortage += weight_[k] * std::max<int64_t>(0, lacking[k]);
  }
  CORE_REQUIRE(shortage == s_.shortage);
  CORE_REQUIRE(excess == s_.excess);
  CORE_REQUIRE(std::abs(stage_cost - s_.stage_cost) < 1e-6 * (1 + stage_cost));
#endif
}

}  // namespace core
