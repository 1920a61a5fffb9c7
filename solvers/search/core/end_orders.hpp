// Small jobs under scarce KV memory: every order is tried in which requests can end, back from the end.
//
// Decode steps are counted back from the end. There a request begins with all its tokens and frees one a
// step, so one that fits in the step in which it begins fits in all of its steps, whatever began before. The
// requests of a stage are over in the same step.
//
// Every optimum has an order and stages. Sort its requests by when they begin. Given order and stages, take
// for each request the first step that is not before the one before it, in which it fits beside those before
// it, and from which it is over no sooner than others of its stage; where it is over later, its stage is
// delayed. All of this is monotone, so repeating it from nothing ends in the fewest decode steps (`settle`).
//
// The search follows orders and stages request by request, but does not look back: a stage that a later
// request delays is delayed from then on, and what began in between stays. So nothing begins later than in
// the schedule of that order and those stages, and no cost is above its cost. A request joins stages under
// way only. A stage that would be over when another request begins is over then, or it is due: the decode
// steps of the shortest request that may join it are then still to come, and what begins has to fit beside
// it. In the optimum one that joins it begins no sooner than what begins now, so it is over no sooner there.
//
// Each end is made a schedule. If no end is cheaper than the best schedule, that is the optimum. Else every
// order and all stages that may be better are followed once more, none dropped for another; each
// looks back.
//
// A state is which requests wait, and of those under way when each is over, its stage, and what is due.
#pragma once

#include <unordered_map>

#include "layers.hpp"

namespace core {

// A request under way, back from the end.
struct Ending {
  int32_t left;    // decode steps until it is over
  uint16_t stage;  // requests of its stage, a bit each
  uint8_t who;
  bool due;  // whether a request that its stage needs is still to come

  bool operator==(const Ending& other) const { return word() == other.word(); }
  uint64_t word() const {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint64_t>(stage) << 16 | who << 1 | due;
  }
};

// Requests under way, the last over first.
struct Endings {
  int number = 0;
  std::array<Ending, 16> each;

  Endings() = default;
  Endings(const uint64_t* words, int columns) {
    for (; number < columns && words[number]; number++) {
      const uint64_t word = words[number];
      each[number] = {static_cast<int32_t>(word >> 32), static_cast<uint16_t>(word >> 16),
                      static_cast<uint8_t>(word >> 1 & 127), (word & 1) != 0};
    }
  }
  std::array<uint64_t, 16> words() const {
    std::array<uint64_t, 16> words{};
    for (int k = 0; k < number; k++) words[k] = each[k].word();
    return words;
  }
  int64_t last() const { return number ? each[0].left : 0; }
  const Ending* begin() const { return each.data(); }
  const Ending* end() const { return each.data() + number; }

  void add(const Ending& one) {
    int at = number++;
    for (; at > 0 && each[at - 1].word() < one.word(); at--) each[at] = each[at - 1];
    each[at] = one;
  }
};

// What fits beside what, and what holds less.
class Room {
 public:
  Room(const Job& job, const Requests& requests)
      : requests_(requests), slots_(std::min(job.slots, job.requests)), capacity_(job.kv_capacity) {}

  // The first step in which a request fits beside those under way.
  int64_t first_fit(const Endings& now, int who) const {
    return first_fit(now, 0, capacity_ - requests_.peak[who], slots_ - 1);
  }
  // The first step from some step on in which those under way hold no more than so many tokens and slots.
  int64_t first_fit(const Endings& now, int64_t from, int64_t tokens, int slots) const {
    int64_t sum = -tokens;
    for (const Ending& one : now) sum += one.left + requests_.first[one.who] - 1;
    for (int live = now.number; live > 0; live--) {
      const Ending& soonest = now.each[live - 1];
      const int64_t begin = live == now.number ? from : std::max<int64_t>(from, now.each[live].left);
      if (live <= slots && begin < soonest.left) {
        const int64_t at = std::max(begin, sum > 0 ? (sum + live - 1) / live : 0);
        if (at < soonest.left) return at;
      }
      sum -= soonest.left + requests_.first[soonest.who] - 1;
    }
    return std::max(from, now.last());
  }

  // Whether requests, over after some steps each, never use more slots and tokens than others.
  //
  // What they use more is most right before one of them is over: of slots, as long as it is not, the others
  // only become fewer, and of tokens, with no more slots, they hold ever less than the others.
  bool holds_no_more(const Endings& ones, const int64_t* left, const Endings& others) const {
    for (int at = 0; at < ones.number; at++) {
      const int64_t over = left[at];
      if (over <= 0) continue;
      int64_t number = 0, held = 0;
      for (int k = 0; k < ones.number; k++) {
        if (left[k] < over) continue;
        number++;
        held += left[k] + requests_.first[ones.each[k].who] - over;
      }
      for (const Ending& other : others) {
        if (other.left < over) break;
        number--;
        held -= other.left + requests_.first[other.who] - over;
      }
      if (number > 0 || held > 0) return false;
    }
    return true;
  }

 private:
  const Requests& requests_;
  int slots_;
  int64_t capacity_;
};

// What is known of each set of requests.
class EndSets {
 public:
  EndSets(const Job& job, const Requests& requests, Budget& budget)
      : job_(job), requests_(requests), columns_(std::min(job.slots, job.requests)) {
    const size_t sets = size_t{1} << requests.number;
    steps.assign(sets, 0);
    read.assign(sets, 0);
    stage.assign(sets, kNever);
    joining.assign(sets, 0);
    stage[0] = 0;
    for (uint32_t set = 1; set < sets; set++) {
      const int low = __builtin_ctz(set);
      const uint32_t rest = set & (set - 1);
      steps[set] = steps[rest] + requests.steps[low];
      read[set] = read[rest] + requests.read[low];
      stage[set] = stage_seconds(set);
    }
    for (uint32_t set = 1; set < sets; set++) joining[set] = may_join(set);
    shared = job.stage_seconds(0);
    beside.assign(columns_ + 1, std::vector<double>(sets, kNever));
    beside[0] = partitions();
    for (int joined = 1; joined <= columns_ && !budget.over(); joined++) join(joined, budget);
  }

  // Steps of the shortest of some requests; none if there are none.
  int64_t fewest(uint32_t set) const { return set ? requests_.steps[31 - __builtin_clz(set)] : 0; }

  std::vector<int64_t> steps, read;         // decode steps, tokens read in them
  std::vector<double> stage;                // seconds of one stage of a set, infinite if it cannot be one
  std::vector<uint32_t> joining;            // requests that may join the stage of a set, and save seconds
  std::vector<std::vector<double>> beside;  // least seconds that a set adds, joining so many stages
  double shared;                            // most seconds that two sets save in one stage

 private:
  double stage_seconds(uint32_t set) const {
    if (__builtin_popcount(set) > columns_ || !fit_together(set)) return kNever;
    int64_t tokens = 0;
    each_of(set, [&](int k) { tokens += requests_.prompt[k]; });
    return job_.within_cap(tokens) ? job_.stage_seconds(static_cast<double>(tokens)) : kNever;
  }

  // Whether requests that are over in one step fit in the last decode step of each.
  bool fit_together(uint32_t set) const {
    bool fit = true;
    each_of(set, [&](int last) {
      int64_t held = 0;
      each_of(set, [&](int k) {
        const bool runs = requests_.steps[k] >= requests_.steps[last];
        held += runs ? requests_.first[k] + requests_.steps[last] - 1 : 0;
      });
      fit &= held <= job_.kv_capacity;
    });
    return fit;
  }

  // The longest begin first, so all that join are no longer; of equal ones the order is free.
  uint32_t may_join(uint32_t set) const {
    uint32_t joining = 0;
    for (int who = 32 - __builtin_clz(set); who < requests_.number; who++) {
      const double apart = stage[set] + stage[1u << who], together = stage[set | 1u << who];
      if (together < apart - kSaved * apart) joining |= 1u << who;
    }
    return joining;
  }

  // The least seconds of the stages of each set.
  std::vector<double> partitions() const {
    std::vector<double> least(stage.size(), kNever);
    least[0] = 0;
    for (uint32_t set = 1; set < least.size(); set++) {
      const uint32_t low = set & -set, rest = set ^ low;
      for (uint32_t more = rest;; more = (more - 1) & rest) {
        least[set] = std::min(least[set], stage[low | more] + least[rest ^ more]);
        if (more == 0) break;
      }
    }
    return least;
  }

  // The least seconds that each set adds if some of it may join one more stage.
  void join(int joined, Budget& budget) {
    const std::vector<double>& before = beside[joined - 1];
    std::vector<double>& least = beside[joined];
    for (uint32_t set = 0; set < least.size(); set++) {
      least[set] = before[set];
      for (uint32_t part = set; part; part = (part - 1) & set) {
        if (__builtin_popcount(part) == columns_) continue;
        least[set] = std::min(least[set], before[set ^ part] + stage[part] - shared);
      }
    }
    budget.used_now();
  }

  static constexpr double kSaved = 1e-10;
  const Job& job_;
  const Requests& requests_;
  int columns_;
};

// The fewest decode steps in which each set of requests can be served with nothing else, or a lower bound.
//
// Some order in which each request begins as soon as it fits, and none before the one before it, takes the
// fewest. Orders are followed request by request for all sets at once. Beyond some number of rows, sets take
// at least the decode steps of those that they contain.
class FewestSteps {
 public:
  FewestSteps(const Requests& requests, const Room& room, double most_rows, Budget& budget)
      : requests_(requests), room_(room), fewest_(size_t{1} << requests.number, 0) {
    rows_.push_back({0, 0, 0, {}});
    for (int size = 1; size <= requests.number && !rows_.empty() && !budget.over(); size++) {
      extend();
      if (static_cast<double>(rows_.size()) > kHopeless * most_rows) break;
      if (size < requests.number) leave_out();
      budget.used_now();
      if (static_cast<double>(rows_.size()) > most_rows) break;
    }
    for (int k = 0; k < requests.number; k++) {
      for (uint32_t set = 0; set < fewest_.size(); set++) {
        if (set >> k & 1) fewest_[set] = std::max(fewest_[set], fewest_[set ^ 1u << k]);
      }
    }
  }
  std::vector<int64_t> result() { return std::move(fewest_); }

 private:
  struct Row {
    uint32_t done;
    int64_t now, rank;
    Endings endings;
  };

  void extend() {
    std::vector<Row> next;
    constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
    std::unordered_map<uint32_t, int64_t> least;
    for (const Row& row : rows_) {
      for (int who = 0; who < requests_.number; who++) {
        if (row.done >> who & 1) continue;
        const int64_t at = room_.first_fit(row.endings, who);
        Row more{row.done | 1u << who, row.now + at, 0, {}};
        for (const Ending& one : row.endings) {
          if (one.left > at) more.endings.add({one.left - static_cast<int32_t>(at), 0, one.who, false});
        }
        more.endings.add({static_cast<int32_t>(requests_.steps[who]), 0, static_cast<uint8_t>(who), false});
        more.rank = more.now;
        for (const Ending& one : more.endings) more.rank += more.now + one.left;
        int64_t& known = least.try_emplace(more.done, kNone).first->second;
        known = std::min(known, more.now + more.endings.last());
        next.push_back(more);
      }
    }
    for (const auto& [set, steps] : least) fewest_[set] = steps;
    rows_ = std::move(next);
  }

  // Leaves out rows that a neighbour with the same requests is ahead of everywhere.
  void leave_out() {
    std::sort(rows_.begin(), rows_.end(), [&](const Row& a, const Row& b) {
      if (a.done != b.done) return a.done < b.done;
      return a.rank != b.rank ? a.rank < b.rank : a.endings.words() < b.endings.words();
    });
    std::vector<Row> kept;
    for (const Row& row : rows_) {
      bool behind = false;
      const size_t from = kept.size() > kCompared ? kept.size() - kCompared : 0;
      for (size_t k = kept.size(); k > from && kept[k - 1].done == row.done && !behind; k--) {
        behind = ahead(kept[k - 1], row);
      }
      if (!behind) kept.push_back(row);
    }
    rows_ = std::move(kept);
  }
  // Whether whatever follows a row can follow another one in the same steps.
  bool ahead(const Row& one, const Row& other) const {
    if (one.now > other.now) return false;
    std::array<int64_t, 16> left;
    for (int k = 0; k < one.endings.number; k++) left[k] = one.endings.each[k].left - (other.now - one.now);
    return room_.holds_no_more(one.endings, left.data(), other.endings);
  }

  static constexpr double kHopeless = 8;
  static constexpr size_t kCompared = 12;
  const Requests& requests_;
  const Room& room_;
  std::vector<int64_t> fewest_;
  std::vector<Row> rows_;
};

class EndOrders : public LayeredSearch {
 public:
  EndOrders(const Job& job, const ExactParameters& parameters, const Limits& limits, double best)
      : LayeredSearch(job, parameters, limits, best),
        room_(job, requests_),
        sets_(job, requests_, budget_),
        fewest_(FewestSteps(requests_, room_, parameters.set_rows, budget_).result()) {
    for (int k = 0; k + 1 < requests_.number; k++) {
      const bool same = requests_.steps[k] == requests_.steps[k + 1];
      if (same && requests_.prompt[k] == requests_.prompt[k + 1]) twins_ |= 1u << k;
    }
  }

  Ended run() {
    const Ended ended = LayeredSearch::run();
    if (ended != Ended::kProof || loosest_ >= to_beat()) return ended;
    return every_path();
  }

  double best(Plan& plan) const {
    if (best_order_.empty()) return kNever;
    std::vector<Placed> order = best_order_;
    std::sort(order.begin(), order.end(), [](const Placed& a, const Placed& b) {
      return a.over != b.over ? a.over > b.over : a.stage < b.stage;
    });
    int32_t stage = 0;
    for (size_t k = 0; k < order.size(); k++) {
      if (k > 0 && order[k].stage != order[k - 1].stage) stage++;
      plan.start[requests_.order[order[k].who]] = static_cast<int32_t>(order[0].over - order[k].over);
      plan.stage[requests_.order[order[k].who]] = stage;
    }
    return best_;
  }

 private:
  // A request in an order: those that begin in its stage, and the step in which it is over.
  struct Placed {
    int who;
    uint32_t stage;
    int64_t over;
  };
  // A stage under way.
  struct Group {
    uint32_t stage;
    int32_t left;
    bool due;
  };
  // The stages under way, the last over first.
  struct Groups {
    int number = 0;
    std::array<Group, 16> each;

    explicit Groups(const Endings& now) {
      for (const Ending& one : now) {
        const bool known = number > 0 && each[number - 1].stage == one.stage;
        if (!known) each[number++] = {one.stage, one.left, one.due};
      }
    }
    const Group* begin() const { return each.data(); }
    const Group* end() const { return each.data() + number; }
  };
  using Fits = std::array<int64_t, 16>;  // the first step in which each request that waits fits
  // A state that is followed.
  struct Followed {
    const State& state;
    Endings now;
    Groups groups;
    uint32_t place;
  };
  // A request that begins: in the stage of others or its own, after some steps.
  struct Begin {
    int who;
    uint32_t joined;
    int64_t at;
    uint32_t due;  // requests of stages that are due then
  };

  void expand(const State& state, const uint64_t* words, uint32_t place) override {
    const Endings now(words, columns_);
    const Followed from{state, now, Groups(now), place};
    each_of(state.waiting, [&](int who) {
      // Of equal requests the first begins first.
      if (who > 0 && (twins_ >> (who - 1) & 1) && (state.waiting >> (who - 1) & 1)) return;
      expand(from, who);
    });
  }

  // Follows a request that begins in a stage of its own, or in one under way.
  void expand(const Followed& from, int who) {
    uint32_t due = 0;
    for (const Group& group : from.groups) due |= group.due ? group.stage : 0;
    begin(from, {who, 0, 0, due}, from.groups.number);
    for (const Group& group : from.groups) {
      if (!(sets_.joining[group.stage] >> who & 1)) continue;
      const int64_t soonest = std::max<int64_t>(0, group.left - requests_.steps[who]);
      begin(from, {who, group.stage, soonest, due & ~group.stage}, from.groups.number);
    }
  }

  // Follows it with some stages due, and with each of those before `next` due that is over by then.
  void begin(const Followed& from, Begin begins, int next) {
    const uint32_t others = from.state.waiting ^ 1u << begins.who;
    int64_t tokens = job_.kv_capacity - requests_.peak[begins.who];
    int slots = columns_ - 1;
    Endings shrinking;
    for (const Ending& one : from.now) {
      int64_t least = requests_.steps[begins.who];
      if (one.stage != begins.joined) {
        if (!(begins.due >> one.who & 1)) {
          shrinking.add(one);
          continue;
        }
        least = sets_.fewest(sets_.joining[one.stage] & others);
        if (least == 0) return;
      }
      // However late it begins, so much is held by those that are over with it, or with one that follows.
      tokens -= requests_.first[one.who] + least - 1;
      slots--;
    }
    if (tokens < 0 || slots < 0) return;
    begins.at = room_.first_fit(shrinking, begins.at, tokens, slots);
    if (!follow(from, begins)) return;
    while (--next >= 0) {
      const Group& group = from.groups.each[next];
      if (group.left > begins.at) break;
      if (group.stage == begins.joined || (begins.due & group.stage)) continue;
      if (!(sets_.joining[group.stage] & others)) continue;
      begin(from, {begins.who, begins.joined, begins.at, begins.due | group.stage}, next);
    }
  }

  // The least seconds of what waits, if none of it begins before some step, and of all decode steps.
  double bound(uint32_t waiting, int64_t now) const {
    return sets_.beside[columns_][waiting] + job_.step * static_cast<double>(now + fewest_[waiting]);
  }

  // Follows a request that begins, and returns whether it and later ones may lead to a better schedule.
  bool follow(const Followed& from, const Begin& begins) {
    const uint32_t bit = 1u << begins.who, waiting = from.state.waiting ^ bit;
    const int64_t steps = requests_.steps[begins.who];
    budget_.spend();
    State next{waiting, from.place, begins.joined << kShift | static_cast<uint32_t>(begins.who),
               from.state.now + begins.at, 0, 0};
    next.spent = from.state.spent + sets_.stage[begins.joined | bit] - sets_.stage[begins.joined];
    const int64_t over = from.state.now + std::max(begins.at + steps, from.now.last());
    if (next.spent + bound(waiting, next.now) >= below()) return false;
    if (next.spent + job_.step * static_cast<double>(over) >= below()) return false;
    Endings now = after(from, begins, waiting);
    if (waiting == 0) {
      finish(next, now);
      return true;
    }
    if (!may_be_better(next, now)) return true;
    if (follows_every_path() && !look_back(next, now)) return true;
    offer(requests_.number - __builtin_popcount(waiting), next, now.words().data());
    return true;
  }

  // What is under way when a request has begun.
  Endings after(const Followed& from, const Begin& begins, uint32_t waiting) const {
    const int32_t steps = static_cast<int32_t>(requests_.steps[begins.who]);
    const uint16_t stage = static_cast<uint16_t>(begins.joined | 1u << begins.who);
    Endings now;
    for (const Ending& one : from.now) {
      const bool due = begins.due >> one.who & 1;
      int32_t left = one.left - static_cast<int32_t>(begins.at);
      if (one.stage == begins.joined) {
        now.add({steps, stage, one.who, false});
      } else {
        if (due) left = static_cast<int32_t>(sets_.fewest(sets_.joining[one.stage] & waiting));
        if (left > 0) now.add({left, one.stage, one.who, due});
      }
    }
    now.add({steps, stage, static_cast<uint8_t>(begins.who), false});
    return now;
  }

  // Delays what is under way to when it is over at the soonest; returns whether it may still be better.
  bool look_back(State& state, Endings& now) {
    const std::vector<Placed> order = settled(state);
    if (order.empty()) return false;
    const Placed& last = order.back();
    int64_t then = last.over - requests_.steps[last.who];
    std::array<int64_t, 16> over;
    for (const Placed& placed : order) over[placed.who] = placed.over;
    for (const Ending& one : now) {
      over[one.who] = std::max(over[one.who], state.now + one.left);
      // A stage that may be joined is not over yet.
      if (!one.due && (sets_.joining[one.stage] & state.waiting)) then = std::min(then, over[one.who] - 1);
    }
    then = std::max(then, state.now);
    Endings later;
    for (const Ending& one : now) {
      const int64_t left = std::max<int64_t>(one.due ? one.left : 0, over[one.who] - then);
      if (left > 0) later.add({static_cast<int32_t>(left), one.stage, one.who, one.due});
    }
    state.now = then;
    now = later;
    return may_be_better(state, now);
  }

  // The order that led to a state with the soonest steps; empty if it cannot lead to a better schedule.
  std::vector<Placed> settled(const State& state) {
    std::vector<Placed> order = order_of(state);
    return settle(order) < kNever ? order : std::vector<Placed>();
  }

  // Makes a schedule of an order and its stages, if that may be the best.
  void finish(const State& last, const Endings& now) {
    if (std::any_of(now.begin(), now.end(), [](const Ending& one) { return one.due; })) return;
    const double seconds = last.spent + job_.step * static_cast<double>(last.now + now.last());
    if (seconds >= to_beat()) return;
    loosest_ = std::min(loosest_, seconds);
    std::vector<Placed> order = order_of(last);
    double real = settle(order);
    CORE_REQUIRE(real + parameters_.tolerance >= seconds);
    if (real > seconds + parameters_.tolerance && ++improved_ <= parameters_.improved) {
      real = improve(order, real, seconds + parameters_.tolerance);
    }
    if (real >= to_beat()) return;
    best_order_ = order;
    found(real);
  }

  // The order of requests, and their stages, that led to a state.
  std::vector<Placed> order_of(const State& last) const {
    std::vector<Placed> order;
    for (const Step& step : path(last.parent, {0, last.begun, last.now})) {
      const int who = static_cast<int>(step.begun & ((1u << kShift) - 1));
      const uint32_t stage = step.begun >> kShift | 1u << who;
      for (Placed& other : order) {
        if (stage >> other.who & 1) other.stage = stage;
      }
      order.push_back({who, stage, 0});
    }
    return order;
  }

  // Moves requests to other places of an order until none makes it better, or it is good enough.
  double improve(std::vector<Placed>& order, double seconds, double enough) {
    bool better = true;
    while (better && seconds > enough && !stopped()) {
      better = false;
      for (size_t from = 0; from < order.size() && !better; from++) {
        for (size_t to = 0; to < order.size() && !better; to++) {
          std::vector<Placed> moved = order;
          const Placed one = moved[from];
          moved.erase(moved.begin() + static_cast<int64_t>(from));
          moved.insert(moved.begin() + static_cast<int64_t>(to), one);
          const double now = settle(moved);
          if (now >= seconds - parameters_.tolerance) continue;
          better = true;
          seconds = now;
          order = moved;
        }
      }
    }
    return seconds;
  }

  // Finds the soonest step in which each stage of an order can be over; returns the seconds of all.
  //
  // Each request begins in the first step, not before the one before it, in which it fits beside those before
  // it, and from which it is over no sooner than its stage. Where it is over later, it delays its stage. All
  // of this is monotone, so repeating it ends in the fewest decode steps.
  double settle(std::vector<Placed>& order) {
    for (Placed& one : order) one.over = 0;
    const double left = (to_beat() - sets_.beside[0][requests_.all()]) / job_.step;
    // In the optimum no decode step is idle.
    const double all = static_cast<double>(sets_.steps[requests_.all()]);
    const int64_t most = static_cast<int64_t>(std::min(left + 1, all));
    std::vector<int64_t> begins(order.size() + 1, 0);
    for (size_t place = 0; place < order.size();) {
      Placed& one = order[place];
      int64_t now = std::max(begins[place], one.over - requests_.steps[one.who]);
      for (int64_t more = 1; now <= most && more > 0 && !stopped(); now += more) {
        more = until_it_fits(order, place, now);
        budget_.spend();
        if (more == kEndless) return kNever;
      }
      if (now > most || stopped()) return kNever;
      begins[++place] = now;
      const int64_t over = now + requests_.steps[one.who];
      if (over <= one.over) continue;
      const uint32_t stage = one.stage;
      size_t first = order.size();
      for (size_t k = 0; k < order.size(); k++) {
        if (order[k].stage != stage) continue;
        order[k].over = over;
        first = std::min(first, k);
      }
      // Requests before the first of the stage begin as they did.
      place = std::min(place, first + 1 < place ? first : place);
    }
    int64_t over = 0;
    uint32_t stages = 0;
    double seconds = 0;
    for (const Placed& one : order) {
      over = std::max(over, one.over);
      if (!(stages & one.stage)) seconds += sets_.stage[one.stage];
      stages |= one.stage;
    }
    return seconds + job_.step * static_cast<double>(over);
  }

  // 0 if a request of an order fits that begins in a step, else a number of steps in which it does not.
  int64_t until_it_fits(const std::vector<Placed>& order, size_t place, int64_t now) const {
    const Placed& one = order[place];
    const int64_t ends = std::max(one.over, now + requests_.steps[one.who]);
    int64_t held = requests_.first[one.who] + ends - 1 - now, number = 1, soonest = kEndless;
    for (size_t k = 0; k < place; k++) {
      const bool mine = order[k].stage == one.stage;
      const int64_t until = mine ? ends : order[k].over;
      if (until <= now) continue;
      held += requests_.first[order[k].who] + until - 1 - now;
      number++;
      if (!mine) soonest = std::min(soonest, until - now);
    }
    if (number <= columns_ && held <= job_.kv_capacity) return 0;
    // Only its own stage is there, delayed by each step that the request waits.
    if (soonest == kEndless && ends == now + requests_.steps[one.who]) return kEndless;
    if (number > columns_) return soonest;
    // Each holds a token less in the next step, but those of a stage that it delays.
    return std::min(soonest, (held - job_.kv_capacity + number - 1) / number);
  }

  // Sets a lower bound on the seconds of a state; returns whether it may lead to a better schedule.
  bool may_be_better(State& state, const Endings& now) const {
    int open = 0;
    double under_way = 0;
    uint32_t all = state.waiting;
    for (const Group& group : Groups(now)) {
      const bool joinable = sets_.joining[group.stage] & state.waiting;
      if (group.due && !joinable) return false;
      open += joinable;
      under_way += sets_.stage[group.stage];
      all |= group.stage;
    }
    const double more = std::max(sets_.beside[open][state.waiting], sets_.beside[0][all] - under_way);
    const double so_far = state.spent + more + job_.step * static_cast<double>(state.now);
    const int64_t steps = decode_steps(state, now);
    if (so_far + job_.step * static_cast<double>(steps) >= below()) return false;
    Fits fits;
    each_of(state.waiting, [&](int who) { fits[who] = room_.first_fit(now, who); });
    state.least = so_far + job_.step * static_cast<double>(decode_steps(state, steps, fits));
    if (state.least >= below()) return false;
    // The most decode steps that a better schedule has from now on.
    const double most = std::ceil((below() - so_far) / job_.step) - 1;
    return shared_out(state.waiting, now, fits, static_cast<int64_t>(most));
  }

  // Whether slots may have room for what waits in some decode steps.
  bool shared_out(uint32_t waiting, const Endings& now, const Fits& fits, int64_t steps) const {
    int64_t soonest = steps;
    each_of(waiting, [&](int who) { soonest = std::min(soonest, fits[who]); });
    Shares shares{{}, fits, steps, 0, static_cast<int>(parameters_.tried_placements)};
    for (int slot = 0; slot < columns_; slot++) {
      shares.free[slot] = std::max(soonest, slot < now.number ? int64_t{now.each[slot].left} : 0);
      shares.room += steps - shares.free[slot];
    }
    return shares.room >= sets_.steps[waiting] && share(shares, waiting);
  }

  // The step from which on each slot is free, and how many ways are still tried.
  struct Shares {
    Fits free;
    const Fits& fits;
    int64_t steps, room;
    int ways;
  };
  // Gives the longest of some requests to each slot in turn, and the others after it.
  bool share(Shares& shares, uint32_t waiting) const {
    if (!waiting || --shares.ways < 0) return true;
    const int who = __builtin_ctz(waiting);
    for (int slot = 0; slot < columns_; slot++) {
      const int64_t from = shares.free[slot], over = from + requests_.steps[who];
      if (std::max(from, shares.fits[who]) + requests_.steps[who] > shares.steps) continue;
      const auto here = shares.free.begin() + slot;
      if (std::find(shares.free.begin(), here, from) != here) continue;  // such a slot has been tried
      shares.free[slot] = over;
      if (share(shares, waiting & (waiting - 1))) return true;
      shares.free[slot] = from;
    }
    return false;
  }

  // The fewest decode steps from now on.
  int64_t decode_steps(const State& state, const Endings& now) const {
    uint32_t alone = state.waiting;
    for (const Ending& one : now) {
      if (one.left >= requests_.steps[one.who]) alone |= 1u << one.who;
    }
    return std::max({now.last(), area(state.waiting, now), fewest_[alone]});
  }
  // The same, with the steps from which each waiting request fits.
  int64_t decode_steps(const State& state, int64_t steps, const Fits& fits) const {
    // Those that fit no sooner than from some step on take their own decode steps from then on.
    std::array<int, 16> late;
    int number = 0;
    each_of(state.waiting, [&](int who) {
      int at = number++;
      for (; at > 0 && fits[late[at - 1]] < fits[who]; at--) late[at] = late[at - 1];
      late[at] = who;
    });
    uint32_t set = 0;
    for (int k = 0; k < number; k++) {
      set |= 1u << late[k];
      steps = std::max(steps, fits[late[k]] + fewest_[set]);
    }
    return steps;
  }

  // Steps that fill all slots, or the KV capacity, with what is left.
  int64_t area(uint32_t waiting, const Endings& now) const {
    int64_t sum = sets_.steps[waiting], read = sets_.read[waiting];
    for (const Ending& one : now) {
      const int64_t left = one.left;
      sum += left;
      read += left * requests_.first[one.who] + left * (left - 1) / 2;
    }
    return std::max((sum + columns_ - 1) / columns_, (read + job_.kv_capacity - 1) / job_.kv_capacity);
  }

  double goal() const override { return std::min(to_beat(), loosest_); }

  double expected(const State& state, const uint64_t* words) const override {
    const double steps = static_cast<double>(area(state.waiting, Endings(words, columns_)));
    return state.least + parameters_.even * (sets_.beside[0][state.waiting] + job_.step * steps);
  }

  // A state as it is compared with others.
  struct Compared {
    uint32_t waiting;
    double cost;
    Endings now;
    Groups groups;
  };

  // Leaves out states that one with the same requests waiting is ahead of.
  void compare(Layer& layer) override {
    struct Key {
      uint32_t waiting, place;
      double about;
    };
    std::vector<Key> keys;
    for (size_t k = 0; k < layer.size(); k++) {
      int64_t left = 0;
      for (const Ending& one : Endings(layer.words(k), columns_)) left += one.left;
      const double about = layer.cost(layer[k]) + job_.step * static_cast<double>(left) / columns_;
      keys.push_back({layer[k].waiting, static_cast<uint32_t>(k), about});
    }
    std::sort(keys.begin(), keys.end(), [](const Key& a, const Key& b) {
      if (a.waiting != b.waiting) return a.waiting < b.waiting;
      return a.about != b.about ? a.about < b.about : a.place < b.place;
    });
    std::vector<Compared> kept;  // of the same requests waiting
    std::vector<uint32_t> places;
    for (const Key& key : keys) {
      if (budget_.over()) break;
      budget_.spend();
      const Endings now(layer.words(key.place), columns_);
      const Compared one{key.waiting, layer.cost(layer[key.place]), now, Groups(now)};
      if (!kept.empty() && kept.back().waiting != key.waiting) kept.clear();
      const auto behind = [&](const Compared& other) { return ahead(other, one); };
      const size_t most = std::min(kept.size(), static_cast<size_t>(parameters_.compared));
      if (std::any_of(kept.rbegin(), kept.rbegin() + static_cast<int64_t>(most), behind)) continue;
      kept.push_back(one);
      places.push_back(key.place);
    }
    std::sort(places.begin(), places.end());
    layer.keep(places);
  }

  // Whether whatever follows another state can follow this one for no more seconds, though some steps later.
  //
  // Then this one holds at no time more slots and tokens. A stage of both, with the same requests, can be
  // delayed here until it is over there. Any other stage that is open there may save seconds, so this state
  // has to be cheaper by those. A stage that is due here has to be due there.
  bool ahead(const Compared& one, const Compared& other) const {
    double slack = other.cost - one.cost;
    Fits left, until;
    until.fill(-1);
    for (const Group& there : other.groups) {
      const Group* here = std::find_if(one.groups.begin(), one.groups.end(),
                                       [&](const Group& group) { return group.stage == there.stage; });
      if (here == one.groups.end() || (here->due && !there.due)) {
        if (sets_.joining[there.stage] & other.waiting) slack -= sets_.shared;
        continue;
      }
      for (int k = 0; k < one.now.number; k++) {
        if (one.now.each[k].stage == there.stage) until[k] = there.left;
      }
    }
    const double tie = kTieShare * parameters_.tolerance;
    if (slack < -tie) return false;
    const int64_t later = static_cast<int64_t>((slack + tie) / job_.step);
    for (int k = 0; k < one.now.number; k++) {
      left[k] = std::max<int64_t>(0, one.now.each[k].left - later);
      if (until[k] < 0 && one.now.each[k].due) return false;
      if (until[k] < 0) continue;
      if (left[k] > until[k]) return false;
      left[k] = until[k];
    }
    return room_.holds_no_more(one.now, left.data(), other.now);
  }

  static constexpr int kShift = 8;
  static constexpr int64_t kEndless = int64_t{1} << 40;
  Room room_;
  EndSets sets_;
  std::vector<int64_t> fewest_;
  uint32_t twins_ = 0;
  double loosest_ = kNever;  // seconds of the cheapest end
  double improved_ = 0;      // ends that were improved
  std::vector<Placed> best_order_;
};

}  // namespace core
