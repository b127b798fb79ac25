// What all tasks but one can earn at most, in no time: slots are sold at one price instead of being counted (Lagrange).
//
// For any price p >= 0 of a slot: sum of keys within `column` slots <= p * column + sum over tasks of max (key - p * count).
// With the price at which as many slots are wanted as there are, the bound is off by about one task's step. The plan table
// uses it to look only at counts that can win.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planner/reward.h"

namespace unicron::planner {

class Relaxation {
 public:
  Relaxation(const std::vector<Row>& rows, int32_t pool);

  // No less than any sum of the rows but `task` within `column` slots. In whole numbers, so it is exact.
  int64_t others(size_t task, int32_t column) const { return price_ * column + total_ - surplus_[task]; }

 private:
  int64_t price_;
  std::vector<int64_t> surplus_;  // per task: max (key - price * count)
  int64_t total_ = 0;
};

}  // namespace unicron::planner
