// The exact dynamic program over tasks: S(i, j) = max over k of S(i - 1, j - k) + G(t_i, k) (Unicron, plan generation).
//
// Only values are kept. The choices of a plan are found again on the way back, where the present count is tried first:
// writing m * n choices would cost as much memory traffic as the sums, and a plan needs m of them.
//
// S(i, j) means at most j slots, so a column beyond the sum of the greatest counts repeats the one before it, and a
// column from which even the greatest counts of the tasks still to come cannot reach the pool is never needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "planner/reward.h"

namespace unicron::planner {

struct Plan {
  int32_t alternative = 0;          // which of the event's alternatives won
  std::vector<int32_t> allocation;  // slots per task; 0 for one that is gone
  double reward_flop = 0;           // sum of G in quanta, less the alternative's cost
  int64_t moves = 0;                // sum over tasks that are there of |x' - x|
};

// Memory for sums that is used again: megabytes of fresh pages cost as much as filling them.
class Buffer {
 public:
  double* reserve(size_t size);  // not initialised; what was reserved before is gone

 private:
  std::unique_ptr<double[]> values_;
  size_t size_ = 0;
};

struct Pools {
  int32_t least;
  int32_t most;
};

// S of a growing list of tasks for all pools between two.
class Chain {
 public:
  // `rest_max`: sum of the greatest counts of all tasks that will still take part, pushed here or not. Reserves the
  // buffer, which must outlive the chain.
  Chain(Pools pools, int64_t rest_max, size_t num_rows_max, Buffer* buffer);

  void push(const Row& row);
  size_t num_rows() const { return num_rows_; }

  // S(num_rows, .): columns [first(num_rows), pools.most] hold, kNever stands below.
  const double* values(size_t num_rows) const { return at(num_rows); }
  int32_t first(size_t num_rows) const { return bounds_[num_rows].first; }
  int32_t cap(size_t num_rows) const { return bounds_[num_rows].cap; }  // columns above it repeat it
  // Slots of each of the first num_rows tasks in a best plan of at most `column` slots; `rows` as pushed.
  void trace(const std::vector<const Row*>& rows, size_t num_rows, int32_t column, int32_t* allocation) const;

 private:
  struct Bounds {
    int32_t first;
    int32_t cap;
    int64_t rest_max;
  };

  double* at(size_t row) { return values_ + row * stride_ + stride_pad_; }
  const double* at(size_t row) const { return values_ + row * stride_ + stride_pad_; }
  void push_first(const Row& row, double* to, int32_t first_column, int32_t cap);

  Pools pools_;
  size_t stride_pad_;
  size_t stride_;
  size_t num_rows_ = 0;
  double* values_;
  std::vector<Bounds> bounds_;  // one per row, row 0 is the empty list
};

// Best choice of one more task when at most `column` slots are there: max over k of from[column - k] + key(k).
struct Best {
  double key = kNever;
  int32_t count = 0;
};
Best best_choice(const double* from, const Row& row, int32_t column);

// The best of the alternatives, each solved on its own: for failures that no table foresaw. Among equal rewards the
// fewer moves, then the earlier. Throws kInvalidArgument when no alternative has a plan.
Plan solve(const Problem& problem, const std::vector<Alternative>& alternatives);

// One alternative; its key is kNever when it has no plan.
struct Solution {
  double key = kNever;
  std::vector<int32_t> allocation;
};
Solution solve_alternative(const Problem& problem, const Alternative& alternative);

// The plan of a key, and which of two plans is better.
Plan make_plan(const Problem& problem, const Alternative& alternative, int32_t index, Solution&& solution);
bool is_better(const Plan& left, const Plan& right);

}  // namespace unicron::planner
