// What the two exact searches share: states in layers, and passes over them that end in a proof.
//
// A layer holds the states in which so many requests have begun. Of equal states the cheapest is kept, and
// none whose lower bound is no better than the best schedule. The first passes keep few states a layer, to
// have a good schedule to beat. Each later pass follows all states below a cut, which is the lowest bound
// that keeps its layers narrow; a schedule no dearer than the cut, or a pass without one, is a proof.
#pragma once

#include <array>
#include <numeric>

#include "common.hpp"

namespace core {

// Tuned values; the fields and their meaning are those of ExactParameters in parameters.py, in its order.
struct ExactParameters {
  double tolerance, bytes, beam, wide_beam, even, width, widening, compared, compared_in_beam, set_rows;
  double tried_placements, improved;
};

// Why an exact search ended.
enum class Ended : int32_t { kProof, kLimit, kMemory };

// Requests with the most decode steps first, then with the longest prompts; a set is a bit for each.
struct Requests {
  explicit Requests(const Job& job) : number(job.requests), order(job.requests) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return job.steps[a] != job.steps[b] ? job.steps[a] > job.steps[b] : job.tokens[a] > job.tokens[b];
    });
    for (const int request : order) {
      const int64_t n = job.steps[request];
      steps.push_back(n);
      prompt.push_back(job.tokens[request]);
      first.push_back(job.held[request]);
      peak.push_back(std::max<int64_t>(job.tokens[request], job.held[request] + n - 1));
      read.push_back(n * job.held[request] + n * (n - 1) / 2);
    }
  }
  uint32_t all() const { return (1u << number) - 1; }

  int number;
  std::vector<int> order;                           // the job's number of each
  std::vector<int64_t> steps, prompt, first, peak;  // decode steps, tokens of prompt, held first and at most
  std::vector<int64_t> read;                        // tokens read in all decode steps
};

// Calls a function with each request of a set.
template <typename Function>
void each_of(uint32_t set, Function function) {
  for (; set; set &= set - 1) function(__builtin_ctz(set));
}

// What began at a state, and the decode steps since the begin or the end.
struct Step {
  uint32_t parent, begun;
  int64_t now;
};

struct State {
  uint32_t waiting;  // requests, a bit each
  uint32_t parent;   // place in the history
  uint32_t begun;    // what began last
  int64_t now;       // decode steps so far
  double spent;      // seconds of the stages so far
  double least;      // of any schedule from here
};

// States with equally many requests begun, each with a row of words for what is under way.
class Layer {
 public:
  Layer(int words, double time_cost) : stride_(words), time_cost_(time_cost) {}

  size_t size() const { return states_.size(); }
  State& operator[](size_t k) { return states_[k]; }
  const uint64_t* words(size_t k) const { return &words_[k * stride_]; }
  size_t bytes() const {
    return states_.capacity() * sizeof(State) + words_.capacity() * sizeof(uint64_t) +
           table_.capacity() * sizeof(uint32_t);
  }

  // Adds a state; of two with the same requests waiting and under way, only the cheaper one if they merge.
  void offer(const State& state, const uint64_t* words, bool merge) {
    if (!merge) return add(state, words);
    if (2 * (states_.size() + 1) > table_.size()) grow();
    size_t at = hash(state.waiting, words) & (table_.size() - 1);
    for (; table_[at]; at = (at + 1) & (table_.size() - 1)) {
      State& other = states_[table_[at] - 1];
      if (other.waiting != state.waiting || !same(words, this->words(table_[at] - 1))) continue;
      if (cost(state) < cost(other)) other = state;
      return;
    }
    add(state, words);
    table_[at] = static_cast<uint32_t>(states_.size());
  }

  // Keeps some states, whose places ascend.
  void keep(const std::vector<uint32_t>& places) {
    for (size_t k = 0; k < places.size(); k++) {
      states_[k] = states_[places[k]];
      std::copy_n(&words_[places[k] * stride_], stride_, &words_[k * stride_]);
    }
    states_.resize(places.size());
    words_.resize(places.size() * stride_);
  }
  // Seconds so far with those of the decode steps.
  double cost(const State& state) const {
    return state.spent + time_cost_ * static_cast<double>(state.now);
  }
  void clear() {
    states_ = {};
    words_ = {};
    table_ = {};
  }

 private:
  void add(const State& state, const uint64_t* words) {
    states_.push_back(state);
    words_.insert(words_.end(), words, words + stride_);
  }
  bool same(const uint64_t* a, const uint64_t* b) const { return std::equal(a, a + stride_, b); }
  uint64_t hash(uint64_t mixed, const uint64_t* words) const {
    for (int k = 0; k < stride_; k++) mixed = (mixed ^ words[k]) * 0x9E3779B97F4A7C15ull;
    return mixed ^ (mixed >> 29) ^ (mixed >> 47);
  }
  void grow() {
    table_.assign(std::max<size_t>(64, 2 * table_.size()), 0);
    for (size_t k = 0; k < states_.size(); k++) {
      size_t at = hash(states_[k].waiting, words(k)) & (table_.size() - 1);
      while (table_[at]) at = (at + 1) & (table_.size() - 1);
      table_[at] = static_cast<uint32_t>(k + 1);
    }
  }

  int stride_;
  double time_cost_;
  std::vector<State> states_;
  std::vector<uint64_t> words_;
  std::vector<uint32_t> table_;  // places and 1, by hash
};

// Layers of states that lead to a schedule better than the best one.
class LayeredSearch {
 public:
  LayeredSearch(const Job& job, const ExactParameters& parameters, const Limits& limits, double best)
      : job_(job),
        parameters_(parameters),
        budget_(limits),
        requests_(job),
        best_(best),
        columns_(std::min(job.slots, job.requests)),
        layers_(job.requests, Layer(columns_, job.step)) {}
  virtual ~LayeredSearch() = default;

  Ended run() {
    for (const double beam : {parameters_.beam, parameters_.wide_beam}) {
      if (pass(beam, kNever)) return Ended::kProof;
      if (stopped()) return ended();
    }
    for (double width = parameters_.width; !pass(kNever, width); width *= parameters_.widening) {
      if (stopped()) return ended();
    }
    return Ended::kProof;
  }
  int64_t moves() const { return budget_.moves(); }
  double cost() const { return best_; }

 protected:

  virtual void expand(const State& state, const uint64_t* words, uint32_t place) = 0;
  // Leaves out what other states of a layer are ahead of.
  virtual void compare(Layer&) {}
  // Seconds that a pass has to reach for a proof.
  virtual double goal() const { return to_beat(); }
  // What a state is worth to a beam.
  virtual double expected(const State& state, const uint64_t* words) const = 0;

  // Goes through all layers once more, and drops no state for another.
  Ended every_path() {
    every_path_ = true;
    pass(kNever, kNever);
    every_path_ = false;
    return stopped() ? ended() : Ended::kProof;
  }
  double to_beat() const { return best_ - parameters_.tolerance; }
  // Seconds from which on states are not followed.
  double below() const { return std::min(to_beat(), cut_); }
  bool follows_every_path() const { return every_path_; }
  bool stopped() const { return out_of_memory_ || budget_.over(); }
  void offer(int placed, const State& state, const uint64_t* words) {
    layers_[placed].offer(state, words, !every_path_);
  }
  static constexpr double kTieShare = 0.01;  // of the tolerance: costs that near are the same

  // Returns what began from the root to a place, and then.
  std::vector<Step> path(uint32_t place, Step last) const {
    std::vector<Step> steps{last};
    for (; history_[place].parent; place = history_[place].parent) steps.push_back(history_[place]);
    std::reverse(steps.begin(), steps.end());
    return steps;
  }
  void found(double cost) {
    best_ = cost;
    budget_.found(cost);
  }

  const Job& job_;
  ExactParameters parameters_;
  Budget budget_;
  Requests requests_;
  double best_;
  int columns_;  // requests under way at a time, at most

 private:
  Ended ended() const { return out_of_memory_ ? Ended::kMemory : Ended::kLimit; }

  // Goes through all layers; returns whether the best schedule is proven to be.
  bool pass(double beam, double width) {
    bool every = true;
    cut_ = kNever;
    history_.assign(1, Step{0, 0, 0});
    for (Layer& layer : layers_) layer.clear();
    const State root{requests_.all(), 0, 0, 0, 0, 0};
    const std::vector<uint64_t> none(columns_, 0);
    layers_[0].offer(root, none.data(), true);
    for (Layer& layer : layers_) {
      every &= narrow(layer, beam, width);
      for (size_t k = 0; k < layer.size() && !stopped(); k++) {
        const State state = layer[k];
        if (state.least >= below()) continue;
        history_.push_back({state.parent, state.begun, state.now});
        expand(state, layer.words(k), static_cast<uint32_t>(history_.size() - 1));
        if (k % kMemoryPause == 0) out_of_memory_ |= bytes() > parameters_.bytes;
      }
      if (stopped()) return false;
      layer.clear();
    }
    return every && goal() <= cut_;
  }

  // Leaves out states of a layer; returns whether all are below the cut or cannot be better.
  bool narrow(Layer& layer, double beam, double width) {
    bool every = true;
    keep_if(layer, [&](size_t k) { return layer[k].least < below(); });
    if (beam < kNever) {
      every &= layer.size() <= beam;
      keep_best(layer, parameters_.compared_in_beam * beam);
    }
    if (!every_path_) compare(layer);
    keep_best(layer, beam);
    if (static_cast<double>(layer.size()) > 2 * width) {
      std::vector<double> least(layer.size());
      for (size_t k = 0; k < layer.size(); k++) least[k] = layer[k].least;
      const auto at = least.begin() + static_cast<int64_t>(width);
      std::nth_element(least.begin(), at, least.end());
      cut_ = std::min(cut_, *at + parameters_.tolerance);
      keep_if(layer, [&](size_t k) { return layer[k].least < below(); });
    }
    return every;
  }

  void keep_best(Layer& layer, double number) {
    if (static_cast<double>(layer.size()) <= number) return;
    std::vector<double> value(layer.size());
    for (size_t k = 0; k < layer.size(); k++) value[k] = expected(layer[k], layer.words(k));
    std::vector<uint32_t> places(layer.size());
    std::iota(places.begin(), places.end(), 0);
    const auto at = places.begin() + static_cast<int64_t>(number);
    std::nth_element(places.begin(), at, places.end(), [&](uint32_t a, uint32_t b) {
      return value[a] != value[b] ? value[a] < value[b] : a < b;
    });
    places.erase(at, places.end());
    std::sort(places.begin(), places.end());
    layer.keep(places);
  }

  size_t bytes() const {
    size_t all = history_.capacity() * sizeof(Step);
    for (const Layer& layer : layers_) all += layer.bytes();
    return all;
  }

  static constexpr size_t kMemoryPause = 256;
  double cut_ = kNever;
  bool out_of_memory_ = false, every_path_ = false;
  std::vector<Layer> layers_;
  std::vector<Step> history_;

 protected:
  template <typename Condition>
  static void keep_if(Layer& layer, Condition condition) {
    std::vector<uint32_t> places;
    for (size_t k = 0; k < layer.size(); k++) {
      if (condition(k)) places.push_back(static_cast<uint32_t>(k));
    }
    if (places.size() < layer.size()) layer.keep(places);
  }
};

}  // namespace core
