#include "planner/knapsack.h"

#include <algorithm>
#include <cassert>
#include <string>
#include <utility>

#include "base/error.h"
#include "planner/max_plus.h"

namespace unicron::planner {

double* Buffer::reserve(size_t size) {
  if (size > size_) {
    values_.reset();  // first, so that both are never there at once
    values_.reset(new double[size]);
    size_ = size;
  }
  return values_.get();
}

Chain::Chain(Pools pools, int64_t rest_max, size_t num_rows_max, Buffer* buffer)
    : pools_(pools),
      stride_pad_(kColumnsPad),
      stride_(kColumnsPad + static_cast<size_t>(pools.most) + 1),
      values_(buffer->reserve(stride_ * (num_rows_max + 1))) {
  bounds_.reserve(num_rows_max + 1);
  bounds_.push_back({0, 0, rest_max});
  std::fill(at(0) - kColumnsPad, at(0), kNever);
  std::fill(at(0), at(0) + pools.most + 1, 0.0);
}

void Chain::push(const Row& row) {
  const Bounds before = bounds_[num_rows_];
  const int64_t rest_max = before.rest_max - row.count_max();
  const auto first_column = static_cast<int32_t>(std::max<int64_t>(0, pools_.least - rest_max));
  const auto cap = static_cast<int32_t>(std::min<int64_t>(pools_.most, int64_t{before.cap} + row.count_max()));
  double* to = at(num_rows_ + 1);
  const auto start = std::min(first_column, cap);
  std::fill(to - kColumnsPad, to + start, kNever);
  if (num_rows_ == 0) {
    push_first(row, to, start, cap);
  } else {
    max_plus(at(num_rows_), {row.counts.data(), row.keys.data(), row.counts.size()}, to, start, cap);
  }
  std::fill(to + cap + 1, to + pools_.most + 1, to[cap]);
  bounds_.push_back({start, cap, rest_max});
  ++num_rows_;
}

// The first task needs no products with all columns: its values are the running maximum of its keys.
void Chain::push_first(const Row& row, double* to, int32_t first_column, int32_t cap) {
  double best = kNever;
  size_t choice = 0;
  for (int32_t column = 0; column <= cap; ++column) {
    while (choice < row.counts.size() && row.counts[choice] <= column) best = std::max(best, row.keys[choice++]);
    if (column >= first_column) to[column] = best;
  }
}

void Chain::trace(const std::vector<const Row*>& rows, size_t num_rows, int32_t column, int32_t* allocation) const {
  for (size_t task = num_rows; task-- > 0;) {
    const Row& row = *rows[task];
    const double* from = at(task);
    const double value = at(task + 1)[column];
    const auto fits = [&](size_t choice) {
      return row.counts[choice] <= column && from[column - row.counts[choice]] + row.keys[choice] == value;
    };
    const auto present = std::lower_bound(row.counts.begin(), row.counts.end(), row.current);
    auto choice = static_cast<size_t>(present - row.counts.begin());
    if (choice == row.counts.size() || row.counts[choice] != row.current || !fits(choice)) {
      for (choice = 0; choice < row.counts.size() && !fits(choice);) ++choice;
    }
    assert(choice < row.counts.size());  // values are exact: the choice that made this one is found again
    allocation[task] = row.counts[choice];
    column -= row.counts[choice];
  }
}

Best best_choice(const double* from, const Row& row, int32_t column) {
  Best best;
  for (size_t choice = 0; choice < row.counts.size() && row.counts[choice] <= column; ++choice) {
    const double key = from[column - row.counts[choice]] + row.keys[choice];
    if (key > best.key) best = {key, row.counts[choice]};
  }
  return best;
}

Solution solve_alternative(const Problem& problem, const Alternative& alternative) {
  const Scale scale = problem.scale(problem.running_s(alternative));
  std::vector<Row> rows;
  int64_t rest_max = 0;
  auto changed = alternative.overrides.begin();
  for (size_t task = 0; task < problem.num_tasks(); ++task) {
    const bool is_changed = changed != alternative.overrides.end() && static_cast<size_t>(changed->task) == task;
    rows.push_back(is_changed ? problem.override_row(*changed++, alternative.pool, scale)
                              : problem.healthy_row(task, alternative.pool, scale));
    rest_max += rows.back().count_max();
  }
  Solution result;
  if (rows.empty()) return Solution{0.0, {}};
  Buffer buffer;
  Chain chain({alternative.pool, alternative.pool}, rest_max, rows.size() - 1, &buffer);
  for (size_t task = 0; task + 1 < rows.size(); ++task) chain.push(rows[task]);
  // The last task is needed at one column only.
  const Best last = best_choice(chain.values(rows.size() - 1), rows.back(), alternative.pool);
  result.key = last.key;
  if (last.key == kNever) return result;
  std::vector<const Row*> pointers;
  for (const Row& row : rows) pointers.push_back(&row);
  result.allocation.resize(rows.size());
  result.allocation.back() = last.count;
  chain.trace(pointers, rows.size() - 1, alternative.pool - last.count, result.allocation.data());
  return result;
}

Plan make_plan(const Problem& problem, const Alternative& alternative, int32_t index, Solution&& solution) {
  const Scale scale = problem.scale(problem.running_s(alternative));
  return Plan{index, std::move(solution.allocation), scale.reward_flop(solution.key) - alternative.cost_flop,
              scale.moves(solution.key)};
}

bool is_better(const Plan& left, const Plan& right) {
  return left.reward_flop > right.reward_flop || (left.reward_flop == right.reward_flop && left.moves < right.moves);
}

Plan solve(const Problem& problem, const std::vector<Alternative>& alternatives) {
  Plan best;
  bool has_plan = false;
  for (size_t index = 0; index < alternatives.size(); ++index) {
    problem.check(alternatives[index]);
    Solution solution = solve_alternative(problem, alternatives[index]);
    if (solution.key == kNever) continue;
    Plan plan = make_plan(problem, alternatives[index], static_cast<int32_t>(index), std::move(solution));
    if (!has_plan || is_better(plan, best)) best = std::move(plan);
    has_plan = true;
  }
  if (!has_plan) throw Error(ErrorCode::kInvalidArgument, "no alternative of this event has a plan");
  return best;
}

}  // namespace unicron::planner
