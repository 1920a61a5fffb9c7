// What the searches share: the job, its costs, a budget and a random generator.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <vector>

// Hot loops are compiled twice where the compiler can, with AVX2 and without; the processor chooses at load.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__ELF__) && \
    !defined(__SANITIZE_ADDRESS__)
#define CORE_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CORE_CLONES
#endif

// A debug build (-DCORE_CHECKS) recomputes every invariant now and then and stops at the first that fails.
#ifdef CORE_CHECKS
#define CORE_REQUIRE(condition)                                                          \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (0)
#else
#define CORE_REQUIRE(condition) ((void)0)
#endif

namespace core {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kTie = 1e-9;  // Costs that differ by less are equal.

// The job as Python hands it over. Every request has one decode step at least.
struct Job {
  int32_t requests;
  int32_t slots;
  int64_t kv_capacity;    // tokens; 0: no limit
  int64_t token_cap;      // prompt tokens of a stage; 0: no limit
  const int32_t* steps;   // decode steps of each request
  const int32_t* tokens;  // prompt tokens of each
  const int32_t* held;    // KV tokens in its first decode step
  double stage_base, stage_floor, per_token, bend, per_token_beyond;  // seconds of a stage
  double step;                                                        // seconds of a decode step

  bool has_memory() const { return kv_capacity > 0; }
  bool within_cap(int64_t tokens_of_stage) const { return token_cap == 0 || tokens_of_stage <= token_cap; }

  // Seconds of a prefill stage that computes some tokens.
  double stage_seconds(double computed) const {
    const double beyond = per_token_beyond > 0 ? per_token_beyond * std::max(0.0, computed - bend) : 0.0;
    return std::max(stage_floor, stage_base + per_token * computed + beyond);
  }
  // Seconds of a stage without the tokens' own price, which is the same in every schedule.
  double stage_price(double tokens) const { return stage_seconds(tokens) - per_token * tokens; }
};

// A schedule as arrays: the first decode step and the stage of each request, stages in order of time.
struct Plan {
  int32_t* start;
  int32_t* stage;
  int32_t* slot;  // read by searches that begin with paths of slots, which write each request's replica
};

// Seconds, moves, or both; another thread may set `stop`.
struct Limits {
  double seconds;                // infinite: no limit
  double enough;                 // decode steps, a bound say: a plan of this cost ends the search
  int64_t moves;                 // 0: no limit
  const volatile int32_t* stop;  // not 0: end with the best so far
  int32_t cpu_seconds;           // not 0: seconds of the process's CPU time, else of a clock on the wall
  int32_t unused;
};

// How much of the limits is used up.
class Budget {
 public:
  explicit Budget(const Limits& limits) : limits_(limits), began_(clock()) {}

  // Count a move; cheap, as the clock is read about twice a millisecond.
  void spend(int64_t moves = 1) {
    moves_ += moves;
    if (moves_ >= next_) refresh();
  }
  // Share of the limits used, as of the last reading.
  double used() const { return used_; }
  // Share of the limits used by now.
  double used_now() {
    refresh();
    return used_;
  }
  bool over() const { return used_ >= 1.0; }
  // Ends the search if a plan is as good as any.
  void found(double cost) {
    if (cost > limits_.enough + kTie) return;
    ended_ = true;
    used_ = std::max(used_, 1.0);
  }
  int64_t moves() const { return moves_; }
  // Moves that the limits will have allowed in all, at the pace so far.
  double moves_in_all() const {
    if (limits_.moves > 0) return static_cast<double>(limits_.moves);
    return used_ > 0 ? static_cast<double>(moves_) / used_ : kNever;
  }

 private:
  double clock() const {
    if (limits_.cpu_seconds) return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void refresh() {
    const double before = elapsed_;
    if (std::isfinite(limits_.seconds)) {
      elapsed_ = clock() - began_;
      // Moves are of different length, so the pause between readings adapts to them.
      if (elapsed_ - before > kPause) pause_ = std::max<int64_t>(1, pause_ / 2);
      if (elapsed_ - before < kPause / 4) pause_ = std::min<int64_t>(kLongestPause, pause_ * 2);
      used_ = elapsed_ / limits_.seconds;
    }
    if (limits_.moves > 0) {
      if (!std::isfinite(limits_.seconds)) used_ = 0;
      used_ = std::max(used_, static_cast<double>(moves_) / static_cast<double>(limits_.moves));
      if (!std::isfinite(limits_.seconds)) pause_ = kFixedPause;
    }
    if (ended_ || *limits_.stop) used_ = std::max(used_, 1.0);
    next_ = moves_ + pause_;
  }

  static constexpr double kPause = 5e-4;
  static constexpr int64_t kLongestPause = 4096, kFixedPause = 16;
  Limits limits_;
  double began_, elapsed_ = 0, used_ = 0;
  bool ended_ = false;
  int64_t moves_ = 0, next_ = 0, pause_ = 4;
};

// SplitMix64: small, fast and the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * kGolden + 1) {}

  uint64_t next() {
    uint64_t z = (state_ += kGolden);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  // A whole number from 0 to below n.
  int below(int n) { return static_cast<int>(((next() >> 32) * static_cast<uint64_t>(n)) >> 32); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
  bool chance(double probability) { return uniform() < probability; }
  int sign() { return chance(0.5) ? 1 : -1; }
  double exponential() { return -std::log(1.0 - uniform()); }
  double normal() {
    const double a = uniform(), b = uniform();
    return std::sqrt(-2 * std::log(1 - a)) * std::cos(2 * M_PI * b);
  }

 private:
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
  uint64_t state_;
};

// A temperature that falls from hot to cold as `done` goes from 0 to 1.
inline double cooled(double hot, double cold, double done) {
  return hot * std::pow(cold / hot, done);
}

}  // namespace core
