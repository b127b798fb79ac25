// Plans before they are needed: the answer to every foreseen event is an element of a vector.
//
// Most events change one task (it lost a slot, it finished) and differ in the pool. Alternatives are therefore grouped
// by pool (and by the n' of D_running). For one pool the sums of the tasks before i (prefix) and after i (suffix) are
// made once; joined they are the best of all tasks but i for every number of slots left to i, so that each alternative
// that changes i alone costs one pass over its counts. Three dynamic programs a pool replace one per event; the answers
// are the same to the bit, because keys are exact (planner/reward.h). An alternative that changes several tasks goes on
// from the prefix before the first to the suffix after the last of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/knapsack.h"

namespace unicron::planner {

constexpr size_t kEventsMax = 1 << 16;

class PlanTable {
 public:
  // Throws kInvalidArgument for an alternative that the problem does not know and for an event without any plan.
  PlanTable(const Problem& problem, const std::vector<std::vector<Alternative>>& events);

  size_t num_events() const { return plans_.size(); }
  // Throws kInvalidArgument outside [0, num_events).
  const Plan& lookup(int64_t event) const;

 private:
  std::vector<Plan> plans_;
};

}  // namespace unicron::planner
