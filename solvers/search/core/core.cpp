// The searches as plain C functions, which Python calls through ctypes.

#include <new>

#include "common.hpp"
#include "end_orders.hpp"
#include "events.hpp"
#include "ruin_recreate.hpp"
#include "spans.hpp"
#include "stage_states.hpp"

#if defined(_WIN32)
#define CORE_API extern "C" __declspec(dllexport)
#else
#define CORE_API extern "C" __attribute__((visibility("default")))
#endif

using namespace core;

// Raised with every change of what these functions take or do; compiled.py names the same number.
CORE_API int32_t core_version() { return 2; }

// Bytes of each structure, by which Python sees that its own ones are the same.
CORE_API int32_t core_bytes(int32_t structure) {
  const size_t bytes[] = {
      sizeof(Job),           sizeof(Plan), sizeof(Limits), sizeof(SpanParameters), sizeof(EventParameters),
      sizeof(RuinParameters), sizeof(ExactParameters)};
  return static_cast<int32_t>(bytes[structure]);
}

// Each search reads the plan that it begins with and overwrites it with the best one. It returns the cost of
// that in decode steps, infinite if it found none, and sets the moves it made.

// No exception may leave a C function: without memory there is no schedule.
template <typename Search>
double best_of(Search& search, Plan& plan, int64_t& moves) {
  search.run();
  moves = search.moves();
  return search.best(plan);
}

CORE_API double core_spans(const Job* job, const SpanParameters* parameters, const Limits* limits,
                           uint64_t seed, int32_t end, Plan* plan, int64_t* moves) try {
  SpanSearch search(*job, *parameters, *limits, seed);
  if (job->has_memory()) search.hold_memory(parameters->memory_share);
  search.load(plan->start, plan->slot, end);
  return best_of(search, *plan, *moves);
} catch (const std::bad_alloc&) {
  return kNever;
}

CORE_API double core_events(const Job* job, const EventParameters* parameters, const Limits* limits,
                            uint64_t seed, int32_t, Plan* plan, int64_t* moves) try {
  EventOrders search(*job, *parameters, *limits, seed);
  search.load(plan->start);
  return best_of(search, *plan, *moves);
} catch (const std::bad_alloc&) {
  return kNever;
}

CORE_API double core_ruin_recreate(const Job* job, const RuinParameters* parameters, const Limits* limits,
                                   uint64_t seed, int32_t end, Plan* plan, int64_t* moves) try {
  RuinRecreate search(*job, *parameters, *limits, seed, end);
  search.load(plan->start, plan->stage);
  return best_of(search, *plan, *moves);
} catch (const std::bad_alloc&) {
  return kNever;
}

// The exact searches look for a schedule of fewer seconds than `best`, without what is the same in all. Each
// returns the seconds of the plan that it writes, infinite if it found none, and sets why it ended.
template <typename Search>
double exact(const Job& job, const ExactParameters& parameters, const Limits& limits, double best, Plan& plan,
             int64_t& moves, Ended& ended) try {
  ended = Ended::kMemory;
  Search search(job, parameters, limits, best);
  ended = search.run();
  moves = search.moves();
  return search.best(plan);
} catch (const std::bad_alloc&) {
  return kNever;
}

CORE_API double core_stage_states(const Job* job, const ExactParameters* parameters, const Limits* limits,
                                  double best, Plan* plan, int64_t* moves, Ended* ended) {
  return exact<StageStates>(*job, *parameters, *limits, best, *plan, *moves, *ended);
}

CORE_API double core_end_orders(const Job* job, const ExactParameters* parameters, const Limits* limits,
                                double best, Plan* plan, int64_t* moves, Ended* ended) {
  return exact<EndOrders>(*job, *parameters, *limits, best, *plan, *moves, *ended);
}
