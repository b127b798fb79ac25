#include "planner/leave_one_out.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "planner/max_plus.h"

namespace unicron::planner {

namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
constexpr size_t kColumnsWorthAll = 8;  // one column costs about as much as that many in a pass over all of them

int64_t count_total(const std::vector<Row>& rows) {
  return std::accumulate(rows.begin(), rows.end(), int64_t{0},
                         [](int64_t sum, const Row& row) { return sum + row.count_max(); });
}

}  // namespace

LeaveOneOut::LeaveOneOut(const Problem& problem, const Scale& scale, std::vector<Row> rows,
                         const Relaxation& relaxation, Pools pools, int64_t overrides_max, Workspace* workspace)
    : problem_(problem),
      scale_(scale),
      rows_(std::move(rows)),
      relaxation_(relaxation),
      pools_(pools),
      count_total_(count_total(rows_) + overrides_max),
      workspace_(workspace),
      prefix_(pools, count_total_, rows_.size(), &workspace->prefix),
      suffix_(pools, count_total_, rows_.size(), &workspace->suffix),
      others_storage_(kColumnsPad + static_cast<size_t>(pools.most) + 1, kUnknown),
      staircase_(static_cast<size_t>(pools.most) + 1) {
  std::fill(others_storage_.begin(), others_storage_.begin() + kColumnsPad, kNever);
  std::iota(staircase_.begin(), staircase_.end(), 0);
  for (const Row& row : rows_) prefix_rows_.push_back(&row);
  suffix_rows_.assign(prefix_rows_.rbegin(), prefix_rows_.rend());
  // The longest prefix and suffix leave out one task: more is needed at one column only.
  for (size_t task = 0; task + 1 < rows_.size(); ++task) {
    prefix_.push(rows_[task]);
    suffix_.push(rows_[rows_.size() - 1 - task]);
  }
}

LeaveOneOut::Bounded LeaveOneOut::best(const Alternative& alternative) {
  if (alternative.overrides.size() > 1) return several_changed(alternative);
  if (alternative.overrides.size() == 1) return one_changed(alternative.overrides.front(), alternative.pool);
  return {best_choice(prefix_.values(rows_.size() - 1), rows_.back(), alternative.pool),
          relaxation_.bound(alternative, {})};
}

std::vector<int32_t> LeaveOneOut::allocation(const Alternative& alternative, const Best& best) {
  if (alternative.overrides.size() > 1) return several_.at(&alternative);
  std::vector<int32_t> result(rows_.size());
  const bool is_changed = !alternative.overrides.empty();
  const size_t task = is_changed ? static_cast<size_t>(alternative.overrides.front().task) : rows_.size() - 1;
  const size_t num_after = rows_.size() - 1 - task;
  const int32_t slots = alternative.pool - best.count;
  const int32_t column = meeting(prefix_.values(task), prefix_.first(task), num_after, slots);
  result[task] = best.count;
  prefix_.trace(prefix_rows_, task, column, result.data());
  trace_suffix(num_after, slots - column, &result);
  return result;
}

// ---------------------------------------------------------------- one changed task

LeaveOneOut::Bounded LeaveOneOut::one_changed(const Override& changed, int32_t pool) {
  const auto task = static_cast<size_t>(changed.task);
  if (task != left_out_) forget_others();
  left_out_ = task;
  const Row row = problem_.override_row(changed, pool, scale_);
  const auto bound = [&](size_t choice) {
    return static_cast<int64_t>(row.keys[choice]) + relaxation_.others(task, pool - row.counts[choice]);
  };
  // The choice with the greatest bound first: what it earns rules out most of the others.
  Best best;
  size_t dearest = 0;
  for (size_t choice = 1; choice < row.counts.size(); ++choice) {
    if (bound(choice) > bound(dearest)) dearest = choice;
  }
  const auto earns = [&](size_t choice) { return others(pool - row.counts[choice]) + row.keys[choice]; };
  if (!row.counts.empty()) best = {earns(dearest), row.counts[dearest]};
  std::vector<std::pair<int64_t, size_t>> promising;
  for (size_t choice = 0; choice < row.counts.size(); ++choice) {
    const int64_t most = bound(choice);
    if (static_cast<double>(most) > best.key && choice != dearest) promising.emplace_back(-most, choice);
  }
  std::sort(promising.begin(), promising.end());
  const size_t num_columns = static_cast<size_t>(problem_.count_max(task, pool)) + 1;
  for (const auto& [most, choice] : promising) {
    if (static_cast<double>(-most) <= best.key) break;
    if (!all_known_ && known_.size() * kColumnsWorthAll > num_columns) make_all_others();
    const double key = earns(choice);
    if (key > best.key) best = {key, row.counts[choice]};
  }
  return {best, row.counts.empty() ? 0 : bound(dearest)};
}

double LeaveOneOut::others(int32_t column) {
  double& value = others_storage_[kColumnsPad + static_cast<size_t>(column)];
  if (!std::isnan(value)) return value;
  const size_t num_after = rows_.size() - 1 - left_out_;
  // Beyond a side's cap its sums repeat, so the other side loses nothing by having the slots.
  const int32_t prefix_cap = prefix_.cap(left_out_);
  const int32_t least = std::min(std::max(prefix_.first(left_out_), column - suffix_.cap(num_after)), prefix_cap);
  const int32_t most = std::min(column, prefix_cap);
  value = best_sum(prefix_.values(left_out_) + least, suffix_.values(num_after) + column - least, most - least + 1);
  known_.push_back(column);
  return value;
}

void LeaveOneOut::make_all_others() {
  const size_t num_after = rows_.size() - 1 - left_out_;
  const int32_t first = std::max(0, pools_.least - problem_.count_max(left_out_, pools_.most));
  double* others = others_storage_.data() + kColumnsPad;
  all_known_ = true;
  if (left_out_ == 0 || num_after == 0) {
    const double* values = left_out_ == 0 ? suffix_.values(num_after) : prefix_.values(left_out_);
    std::copy(values + first, values + pools_.most + 1, others + first);
    return;
  }
  // The shorter of the two gives the choices: the work is their number times the columns.
  const bool is_prefix_shorter = prefix_.cap(left_out_) <= suffix_.cap(num_after);
  const Chain& chosen = is_prefix_shorter ? prefix_ : suffix_;
  const Chain& source = is_prefix_shorter ? suffix_ : prefix_;
  const size_t chosen_row = is_prefix_shorter ? left_out_ : num_after;
  const size_t source_row = is_prefix_shorter ? num_after : left_out_;
  const int32_t from = chosen.first(chosen_row);
  const Choices choices{staircase_.data() + from, chosen.values(chosen_row) + from,
                        static_cast<size_t>(chosen.cap(chosen_row) - from + 1)};
  max_plus(source.values(source_row), choices, others, first, pools_.most);
}

void LeaveOneOut::forget_others() {
  double* others = others_storage_.data() + kColumnsPad;
  if (all_known_) std::fill(others, others + pools_.most + 1, kUnknown);
  for (const int32_t column : known_) others[column] = kUnknown;
  known_.clear();
  all_known_ = false;
}

// ---------------------------------------------------------------- several changed tasks

LeaveOneOut::Bounded LeaveOneOut::several_changed(const Alternative& alternative) {
  const auto first = static_cast<size_t>(alternative.overrides.front().task);
  const auto last = static_cast<size_t>(alternative.overrides.back().task);
  const int32_t pool = alternative.pool;
  // The prefix is one row: every number of slots it may take, with its value.
  std::vector<Row> rows{as_row(prefix_, first)};
  std::vector<Row> changed;
  for (size_t task = first; task <= last; ++task) {
    const Override& next = alternative.overrides[changed.size()];
    const bool is_changed = static_cast<size_t>(next.task) == task;
    if (is_changed) changed.push_back(problem_.override_row(next, pool, scale_));
    rows.push_back(is_changed ? changed.back() : rows_[task]);
  }
  std::vector<const Row*> pointers;
  Chain middle({pool, pool}, count_total_, rows.size(), &workspace_->middle);
  for (const Row& row : rows) {
    pointers.push_back(&row);
    middle.push(row);
  }
  const size_t num_after = rows_.size() - 1 - last;
  const double* values = middle.values(rows.size());
  const int32_t column = meeting(values, middle.first(rows.size()), num_after, pool);
  const Best best{values[column] + suffix_.values(num_after)[pool - column], 0};
  std::vector<int32_t> result(rows_.size());
  if (best.key != kNever) {
    std::vector<int32_t> counts(rows.size());
    middle.trace(pointers, rows.size(), column, counts.data());
    std::copy(counts.begin() + 1, counts.end(), result.begin() + static_cast<ptrdiff_t>(first));
    prefix_.trace(prefix_rows_, first, counts[0], result.data());
    trace_suffix(num_after, pool - column, &result);
  }
  several_[&alternative] = std::move(result);
  return {best, relaxation_.bound(alternative, changed)};
}

Row LeaveOneOut::as_row(const Chain& chain, size_t num_rows) const {
  const int32_t from = chain.first(num_rows);
  const int32_t cap = chain.cap(num_rows);
  return Row{-1,
             {staircase_.begin() + from, staircase_.begin() + cap + 1},
             {chain.values(num_rows) + from, chain.values(num_rows) + cap + 1}};
}

// ---------------------------------------------------------------- both

int32_t LeaveOneOut::meeting(const double* before, int32_t first, size_t num_after, int32_t slots) const {
  const double* after = suffix_.values(num_after);
  int32_t best = 0;
  double key = kNever;
  for (int32_t column = first; column <= slots; ++column) {
    const double sum = before[column] + after[slots - column];
    if (sum > key) {
      key = sum;
      best = column;
    }
  }
  return best;
}

void LeaveOneOut::trace_suffix(size_t num_after, int32_t column, std::vector<int32_t>* allocation) const {
  std::vector<int32_t> reversed(num_after);
  suffix_.trace(suffix_rows_, num_after, column, reversed.data());
  std::copy(reversed.begin(), reversed.end(), allocation->rbegin());
}

}  // namespace unicron::planner
