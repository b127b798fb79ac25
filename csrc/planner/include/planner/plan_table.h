// Plans before they are needed: the answer to every foreseen event is an element of a vector.
//
// Most events change one task (it lost a slot, it finished) and differ in the pool. What they share is D_running, so
// alternatives are grouped by horizon: one prefix and one suffix of the healthy tasks (planner/leave_one_out.h) answer
// all of a group, whatever their pools. They are made of the few counts that can be in a best plan, by a bound
// (planner/relaxation.h) that is checked for each answer. So the answers are those of a direct solve to the bit, at a
// small part of the cost of one dynamic program per event. An alternative that changes several tasks goes on from the
// prefix before the first to the suffix after the last of them.
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
  PlanTable(const Problem& problem, const std::vector<std::vector<const Alternative*>>& events);

  size_t num_events() const { return plans_.size(); }
  // Throws kInvalidArgument outside [0, num_events).
  const Plan& lookup(int64_t event) const;

 private:
  std::vector<Plan> plans_;
};

}  // namespace unicron::planner
