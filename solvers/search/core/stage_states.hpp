// Small jobs of every kind: every prefill stage is tried from every state.
//
// A state, right before a prefill stage, is which requests wait, and the decode steps left and tokens held of
// each that is under way. From each state every stage is tried that the slots, the token cap and the KV
// capacity have room for to the end of those under way, and then every number of decode steps until the next
// stage. What need not be tried:
//
// - A stage that follows no end of a request, where the capacity can no longer be exceeded. It could be a
//   decode step earlier, with the same slots free.
// - Two stages with no decode step between them, but under a token cap, a bend, or with requests of no decode
//   step: one stage costs no more.
// - Of equal requests, a later one before an earlier one.
// - A stage that leaves a slot free while a request waits, if stages cost the same however full they are and
//   only slots are scarce: a request that waits could start then instead of later.
#pragma once

#include <functional>
#include <unordered_map>

#include "layers.hpp"

namespace core {

class StageStates : public LayeredSearch {
 public:
  StageStates(const Job& job, const ExactParameters& parameters, const Limits& limits, double best)
      : LayeredSearch(job, parameters, limits, best), capacity_(job.has_memory() ? job.kv_capacity : kMost) {
    std::vector<int64_t> peaks = requests_.peak;
    std::sort(peaks.rbegin(), peaks.rend());
    scarce_ = std::accumulate(peaks.begin(), peaks.begin() + columns_, int64_t{0}) > capacity_;
    const int64_t tokens = std::accumulate(requests_.prompt.begin(), requests_.prompt.end(), int64_t{0});
    const bool none = requests_.steps.back() == 0;
    const int64_t most = job.token_cap > 0 ? std::min(job.token_cap, tokens) : tokens;
    bends_ = job.per_token_beyond > 0 && static_cast<double>(most) > job.bend;
    at_once_ = job.token_cap > 0 || bends_ || none;
    const bool equal_stages = !(scarce_ || job.token_cap > 0 || bends_ || job.stage_floor > 0);
    fills_ = equal_stages && !none;
    for (int k = 0; k + 1 < requests_.number; k++) {
      const bool same = requests_.steps[k] == requests_.steps[k + 1];
      if (same && (equal_stages || requests_.prompt[k] == requests_.prompt[k + 1])) twins_ |= 1u << k;
    }
    if (requests_.number <= kTabled) table_.resize(size_t{1} << requests_.number);
  }

  double best(Plan& plan) const {
    if (path_.empty()) return kNever;
    for (size_t k = 0; k < path_.size(); k++) {
      each_of(path_[k].begun, [&](int request) {
        plan.start[requests_.order[request]] = static_cast<int32_t>(k > 0 ? path_[k - 1].now : 0);
        plan.stage[requests_.order[request]] = static_cast<int32_t>(k);
      });
    }
    return best_;
  }

 private:
  // What is known of a set of waiting requests.
  struct Facts {
    int64_t steps = -1, read = 0, longest = 0, shortest = kMost, smallest = kMost;
    double prefill = 0;
    std::vector<int64_t> peaks;  // most tokens that 0, 1, 2 ... of them hold together
  };
  // Decode steps left and tokens held of requests under way, those with the most left first.
  struct Running {
    int number = 0;
    std::array<int64_t, 32> left, held;
  };

  const Facts& facts(uint32_t set) const {
    Facts& known = table_.empty() ? more_[set] : table_[set];
    if (known.steps < 0) known = found_facts(set);
    return known;
  }

  Facts found_facts(uint32_t set) const {
    Facts facts;
    facts.steps = 0;
    int64_t tokens = 0;
    double within = 0;
    each_of(set, [&](int k) {
      facts.steps += requests_.steps[k];
      facts.read += requests_.read[k];
      facts.longest = std::max(facts.longest, requests_.steps[k]);
      facts.shortest = std::min(facts.shortest, requests_.steps[k]);
      facts.smallest = std::min(facts.smallest, requests_.prompt[k]);
      facts.peaks.push_back(requests_.peak[k]);
      tokens += requests_.prompt[k];
      within += std::min(static_cast<double>(requests_.prompt[k]), job_.bend);
    });
    std::sort(facts.peaks.rbegin(), facts.peaks.rend());
    facts.peaks.insert(facts.peaks.begin(), 0);
    std::partial_sum(facts.peaks.begin(), facts.peaks.end(), facts.peaks.begin());
    facts.prefill = least_prefill(__builtin_popcount(set), tokens, within);
    return facts;
  }

  // The least seconds of prefill over all numbers of stages that are enough.
  double least_prefill(int number, int64_t tokens, double within) const {
    const int64_t cap = job_.token_cap > 0 ? std::min(job_.token_cap, capacity_) : capacity_;
    const int64_t fewest = std::max<int64_t>((number + columns_ - 1) / columns_, (tokens + cap - 1) / cap);
    double least = kNever;
    for (int64_t stages = fewest; stages <= std::max<int64_t>(bends_ ? number : fewest, fewest); stages++) {
      const double some = static_cast<double>(stages), all = static_cast<double>(tokens);
      double seconds = job_.stage_base * some + job_.per_token * all;
      const double beyond = all - within + std::max(0.0, within - some * job_.bend);
      if (bends_) seconds += job_.per_token_beyond * beyond;
      least = std::min(least, std::max(seconds, job_.stage_floor * some));
    }
    return least;
  }

  Running running(const uint64_t* words) const {
    Running now;
    for (; now.number < columns_ && words[now.number]; now.number++) {
      now.left[now.number] = static_cast<int64_t>(words[now.number] >> kBits);
      now.held[now.number] = static_cast<int64_t>(words[now.number] & kMask);
    }
    return now;
  }

  void expand(const State& state, const uint64_t* words, uint32_t place) override {
    const Running now = running(words);
    const int waiting = __builtin_popcount(state.waiting), free = std::min(columns_ - now.number, waiting);
    int64_t held = 0;
    for (int k = 0; k < now.number; k++) held += now.held[k];
    if (free > 0) choose(state, now, place, held, state.waiting, 0, 0, free);
  }

  // Tries every stage with these requests and others of `rest`.
  void choose(const State& state, const Running& now, uint32_t place, int64_t held, uint32_t rest,
              uint32_t stage, int64_t tokens, int room) {
    for (; rest && !stopped(); rest &= rest - 1) {
      const int request = __builtin_ctz(rest);
      const uint32_t with = stage | 1u << request;
      // Of equal requests the first that waits begins first.
      if (request > 0 && (twins_ & state.waiting & ~with) >> (request - 1) & 1) continue;
      const int64_t sum = tokens + requests_.prompt[request];
      if (job_.within_cap(sum) && held + sum <= capacity_) {
        if (room == 1 || !fills_) begin(state, now, place, with, sum);
        if (room > 1) choose(state, now, place, held, rest & (rest - 1), with, sum, room - 1);
      }
    }
  }

  // Follows a stage, if it fits and may lead to a better schedule.
  void begin(const State& state, const Running& before, uint32_t place, uint32_t stage, int64_t tokens) {
    const uint32_t waiting = state.waiting & ~stage;
    State next{waiting, place, stage, state.now, 0, 0};
    next.spent = state.spent + job_.stage_seconds(static_cast<double>(tokens));
    const double so_far = next.spent + job_.step * static_cast<double>(next.now);
    if (so_far + facts(waiting).prefill >= below()) return;
    Running now = before;
    each_of(stage, [&](int request) {
      if (requests_.steps[request] == 0) return;
      int at = now.number++;
      for (; at > 0 && now.left[at - 1] < requests_.steps[request]; at--) {
        now.left[at] = now.left[at - 1];
        now.held[at] = now.held[at - 1];
      }
      now.left[at] = requests_.steps[request];
      now.held[at] = scarce_ ? requests_.first[request] : 0;
    });
    next.least = so_far + least(waiting, now);
    if (next.least >= below() || !fits(now)) return;
    budget_.spend();
    if (waiting == 0) {
      const int64_t left = now.number ? now.left[0] : 0;
      const double seconds = so_far + job_.step * static_cast<double>(left);
      if (seconds >= to_beat()) return;
      path_ = path(place, {0, stage, state.now + left});
      return found(seconds);
    }
    wait(next, now);
  }

  // Whether requests under way fit to their ends: what is held is most in the last step of one.
  bool fits(const Running& now) const {
    if (!scarce_) return true;
    int64_t sum = 0;
    for (int k = 0; k < now.number; k++) {
      sum += now.held[k];
      const bool last = k + 1 == now.number || now.left[k + 1] < now.left[k];
      if (last && sum + (k + 1) * (now.left[k] - 1) > capacity_) return false;
    }
    return true;
  }

  // Follows each number of decode steps until the next stage.
  void wait(const State& state, const Running& now) {
    if (at_once_) keep(state, now);
    if (scarce_ && can_bind(state.waiting, now)) {
      for (int64_t steps = 1; now.number && steps <= now.left[0]; steps++) {
        if (!wait_for(state, now, steps, true)) return;
      }
      return;
    }
    for (int k = now.number - 1; k >= 0; k--) {
      if (k < now.number - 1 && now.left[k] == now.left[k + 1]) continue;
      if (!wait_for(state, now, now.left[k], false)) return;
    }
  }

  // Keeps the state after some decode steps; returns false if it and all later ones are too dear.
  bool wait_for(const State& state, const Running& now, int64_t steps, bool with_room) {
    Running later;
    for (int k = 0; k < now.number && now.left[k] > steps; k++) {
      later.left[k] = now.left[k] - steps;
      later.held[k] = scarce_ ? now.held[k] + steps : 0;
      later.number = k + 1;
    }
    State next = state;
    next.now += steps;
    next.least = next.spent + job_.step * static_cast<double>(next.now) + least(state.waiting, later);
    if (next.least >= below()) return false;
    if (!with_room || has_room(state.waiting, later)) keep(next, later);
    return true;
  }

  void keep(const State& state, const Running& now) {
    CORE_REQUIRE(fits(now));
    if (now.number == columns_) return;
    std::array<uint64_t, 32> words{};
    for (int k = 0; k < now.number; k++) {
      words[k] = static_cast<uint64_t>(now.left[k]) << kBits | static_cast<uint64_t>(now.held[k]);
    }
    for (int a = 1; a < now.number; a++) {
      for (int b = a; b > 0 && words[b] > words[b - 1]; b--) std::swap(words[b], words[b - 1]);
    }
    offer(requests_.number - __builtin_popcount(state.waiting), state, words.data());
  }

  // Whether those under way and waiting could hold more than the capacity.
  bool can_bind(uint32_t waiting, const Running& now) const {
    const Facts& facts = this->facts(waiting);
    std::array<int64_t, 32> peaks;
    for (int k = 0; k < now.number; k++) peaks[k] = now.held[k] + now.left[k] - 1;
    std::sort(peaks.begin(), peaks.begin() + now.number, std::greater<int64_t>());
    int64_t sum = 0;
    for (int k = 0; k <= now.number; k++) {
      const size_t others = std::min(static_cast<size_t>(columns_ - k), facts.peaks.size() - 1);
      if (sum + facts.peaks[others] > capacity_) return true;
      if (k < now.number) sum += peaks[k];
    }
    return false;
  }

  // Whether a request could start: one with the fewest prompt tokens and the fewest decode steps.
  bool has_room(uint32_t waiting, const Running& now) const {
    const Facts& facts = this->facts(waiting);
    if (now.number == columns_) return false;
    int64_t sum = facts.smallest;
    for (int k = 0; k < now.number; k++) {
      sum += now.held[k];
      const bool last = k + 1 == now.number || now.left[k + 1] < now.left[k];
      const bool runs = now.left[k] <= facts.shortest;
      if (last && runs && sum + (k + 2) * (now.left[k] - 1) > capacity_) return false;
    }
    return sum <= capacity_;
  }

  // The least seconds still to come.
  double least(uint32_t waiting, const Running& now) const {
    const Facts& facts = this->facts(waiting);
    int64_t sum = facts.steps, read = facts.read;
    for (int k = 0; k < now.number; k++) {
      sum += now.left[k];
      read += now.left[k] * now.held[k] + now.left[k] * (now.left[k] - 1) / 2;
    }
    int64_t steps = std::max((sum + columns_ - 1) / columns_, now.number ? now.left[0] : 0);
    steps = std::max(steps, facts.longest + (now.number == columns_ ? now.left[columns_ - 1] : 0));
    if (scarce_) steps = std::max(steps, (read + capacity_ - 1) / capacity_);
    return facts.prefill + job_.step * static_cast<double>(steps);
  }

  // About how many seconds schedules from a state take.
  double expected(const State& state, const uint64_t* words) const override {
    const Running now = running(words);
    int64_t sum = 0, read = 0;
    each_of(state.waiting, [&](int k) {
      sum += requests_.steps[k];
      read += requests_.read[k];
    });
    for (int k = 0; k < now.number; k++) {
      sum += now.left[k];
      read += now.left[k] * now.held[k] + now.left[k] * (now.left[k] - 1) / 2;
    }
    double steps = static_cast<double>(sum) / columns_;
    if (scarce_) {
      const double by_memory = static_cast<double>(read) / static_cast<double>(capacity_);
      steps = std::max(steps, by_memory) + parameters_.even * (steps + by_memory);
    }
    steps += static_cast<double>(state.now);
    return state.spent + facts(state.waiting).prefill + job_.step * steps;
  }

  static constexpr int kTabled = 16, kBits = 32;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  static constexpr int64_t kMost = int64_t{1} << 40;
  int64_t capacity_;
  bool scarce_, bends_, at_once_, fills_;
  uint32_t twins_ = 0;
  std::vector<Step> path_;
  mutable std::vector<Facts> table_;  // by set, where there are few; filled on demand
  mutable std::unordered_map<uint32_t, Facts> more_;
};

}  // namespace core
