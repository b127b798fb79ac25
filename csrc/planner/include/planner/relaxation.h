// What all tasks but one can earn at most, in no time: slots are sold at one price instead of being counted (Lagrange).
//
// For any price p >= 0 of a slot: sum of keys within `column` slots <= p * column + sum over tasks of max (key - p *
// count). With the price at which as many slots are wanted as there are, the bound is off by about one task's step. So
// counts that fall further short of their task's best at this price than the bound is off are in no best plan, and that
// is nearly all of them: the plan table computes with the others and then sees by the bound whether that was enough.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/reward.h"

namespace unicron::planner {

class Relaxation {
 public:
  Relaxation() = default;  // of nothing
  Relaxation(const std::vector<Row>& rows, int32_t pool);

  // All bounds are whole numbers, so they are exact.
  // No less than any sum of the rows but `task` within `column` slots.
  int64_t others(size_t task, int32_t column) const { return price_ * column + total_ - surplus_[task]; }
  // No less than the best key of the alternative. `changed`: the rows of its overrides.
  int64_t bound(const Alternative& alternative, const std::vector<Row>& changed) const;
  // By how much the bound may be off, as a first guess: a little of what a mean task earns.
  int64_t gap_guess(int32_t pool) const;
  // The row without the counts that fall short by more than `gap`.
  Row within(const Row& row, size_t task, int64_t gap) const;

 private:
  int64_t surplus(const Row& row) const;

  int64_t price_ = 0;
  std::vector<int64_t> surplus_;  // per task: max (key - price * count)
  int64_t total_ = 0;
};

}  // namespace unicron::planner
