#include "planner/plan_table.h"

#include <algorithm>
#include <cassert>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/error.h"
#include "planner/max_plus.h"

namespace unicron::planner {

namespace {

struct Member {
  size_t event;
  int32_t index;  // of the alternative in its event
  const Alternative* alternative;
};

// Prefix and suffix sums of the healthy tasks for one pool and one horizon. suffix row r covers the last r tasks.
class LeaveOneOut {
 public:
  LeaveOneOut(const Problem& problem, int32_t pool, double running_s);
  Solution unchanged() const;
  // Makes the sums of all tasks but `task`, for one_changed().
  void leave_out(size_t task);
  // `changed` alone differs; leave_out() of its task was the last call.
  Solution one_changed(const Override& changed) const;
  // Several tasks differ: from the prefix before the first of them to the suffix after the last.
  Solution several_changed(const std::vector<Override>& changed) const;

 private:
  std::vector<Row> make_rows() const;
  Row as_row(const Chain& chain, size_t num_rows) const;
  // The column at which `left` and the last num_after tasks together are best within `slots`.
  int32_t meeting(const Chain& left, size_t num_left, size_t num_after, int32_t slots, double* key) const;
  void split(const Chain& left, size_t num_left, size_t num_after, int32_t slots,
             std::vector<int32_t>* allocation) const;
  void trace_suffix(size_t num_after, int32_t column, std::vector<int32_t>* allocation) const;

  const Problem& problem_;
  int32_t pool_;
  Scale scale_;
  std::vector<Row> rows_;
  int64_t count_total_;
  Chain prefix_;
  Chain suffix_;
  std::vector<const Row*> prefix_rows_;
  std::vector<const Row*> suffix_rows_;
  std::vector<double> others_storage_;
  std::vector<int32_t> staircase_;  // 0, 1, 2, ... as counts of dense choices
};

LeaveOneOut::LeaveOneOut(const Problem& problem, int32_t pool, double running_s)
    : problem_(problem),
      pool_(pool),
      scale_(problem.scale(pool, running_s)),
      rows_(make_rows()),
      count_total_(std::accumulate(rows_.begin(), rows_.end(), int64_t{0},
                                   [](int64_t sum, const Row& row) { return sum + row.count_max(); })),
      prefix_(pool, count_total_, rows_.size()),
      suffix_(pool, count_total_, rows_.size()),
      others_storage_(kColumnsPad + static_cast<size_t>(pool) + 1, kNever),
      staircase_(static_cast<size_t>(pool) + 1) {
  std::iota(staircase_.begin(), staircase_.end(), 0);
  for (const Row& row : rows_) prefix_rows_.push_back(&row);
  suffix_rows_.assign(prefix_rows_.rbegin(), prefix_rows_.rend());
  // The longest prefix and suffix leave out one task: more is needed at one column only.
  for (size_t task = 0; task + 1 < rows_.size(); ++task) {
    prefix_.push(rows_[task]);
    suffix_.push(rows_[rows_.size() - 1 - task]);
  }
}

Solution LeaveOneOut::unchanged() const {
  const size_t last = rows_.size() - 1;
  const Best best = best_choice(prefix_.values(last), rows_[last], pool_);
  Solution result{best.key, std::vector<int32_t>(rows_.size())};
  if (best.key == kNever) return result;
  result.allocation[last] = best.count;
  prefix_.trace(prefix_rows_, last, pool_ - best.count, result.allocation.data());
  return result;
}

void LeaveOneOut::leave_out(size_t task) {
  const size_t num_after = rows_.size() - 1 - task;
  const int32_t first = std::max(0, pool_ - rows_[task].count_max());
  double* others = others_storage_.data() + kColumnsPad;
  if (task == 0 || num_after == 0) {
    const Chain& chain = task == 0 ? suffix_ : prefix_;
    std::copy(chain.values(rows_.size() - 1) + first, chain.values(rows_.size() - 1) + pool_ + 1, others + first);
    return;
  }
  // The shorter of the two gives the choices: the work is their number times the columns.
  const bool is_prefix_shorter = prefix_.cap(task) <= suffix_.cap(num_after);
  const Chain& chosen = is_prefix_shorter ? prefix_ : suffix_;
  const Chain& source = is_prefix_shorter ? suffix_ : prefix_;
  const size_t chosen_row = is_prefix_shorter ? task : num_after;
  const size_t source_row = is_prefix_shorter ? num_after : task;
  const int32_t from = chosen.first(chosen_row);
  const Choices choices{staircase_.data() + from, chosen.values(chosen_row) + from,
                        static_cast<size_t>(chosen.cap(chosen_row) - from + 1)};
  max_plus(source.values(source_row), choices, others, first, pool_);
}

Solution LeaveOneOut::one_changed(const Override& changed) const {
  const auto task = static_cast<size_t>(changed.task);
  const size_t num_after = rows_.size() - 1 - task;
  const Best best =
      best_choice(others_storage_.data() + kColumnsPad, problem_.override_row(changed, pool_, scale_), pool_);
  Solution result{best.key, std::vector<int32_t>(rows_.size())};
  if (best.key == kNever) return result;
  result.allocation[task] = best.count;
  split(prefix_, task, num_after, pool_ - best.count, &result.allocation);
  return result;
}

Solution LeaveOneOut::several_changed(const std::vector<Override>& changed) const {
  const auto first = static_cast<size_t>(changed.front().task);
  const auto last = static_cast<size_t>(changed.back().task);
  std::vector<Row> rows;
  std::vector<const Row*> pointers;
  auto next = changed.begin();
  for (size_t task = first; task <= last; ++task) {
    const bool is_changed = static_cast<size_t>(next->task) == task;
    rows.push_back(is_changed ? problem_.override_row(*next++, pool_, scale_) : rows_[task]);
  }
  for (const Row& row : rows) pointers.push_back(&row);
  Chain middle(pool_, count_total_, rows.size() + 1);
  // The prefix is one row of the middle: every number of slots it may take, with its value.
  const Row before = as_row(prefix_, first);
  pointers.insert(pointers.begin(), &before);
  for (const Row* row : pointers) middle.push(*row);
  const size_t num_after = rows_.size() - 1 - last;
  Solution result{kNever, std::vector<int32_t>(rows_.size())};
  const int32_t column = meeting(middle, pointers.size(), num_after, pool_, &result.key);
  if (result.key == kNever) return result;
  std::vector<int32_t> counts(pointers.size());
  middle.trace(pointers, pointers.size(), column, counts.data());
  std::copy(counts.begin() + 1, counts.end(), result.allocation.begin() + static_cast<ptrdiff_t>(first));
  prefix_.trace(prefix_rows_, first, counts[0], result.allocation.data());
  trace_suffix(num_after, pool_ - column, &result.allocation);
  return result;
}

std::vector<Row> LeaveOneOut::make_rows() const {
  std::vector<Row> rows;
  for (size_t task = 0; task < problem_.num_tasks(); ++task) rows.push_back(problem_.healthy_row(task, pool_, scale_));
  return rows;
}

Row LeaveOneOut::as_row(const Chain& chain, size_t num_rows) const {
  const int32_t from = chain.first(num_rows);
  const int32_t cap = chain.cap(num_rows);
  return Row{-1,
             {staircase_.begin() + from, staircase_.begin() + cap + 1},
             {chain.values(num_rows) + from, chain.values(num_rows) + cap + 1}};
}

int32_t LeaveOneOut::meeting(const Chain& left, size_t num_left, size_t num_after, int32_t slots, double* key) const {
  const double* before = left.values(num_left);
  const double* after = suffix_.values(num_after);
  int32_t best = 0;
  *key = kNever;
  for (int32_t column = left.first(num_left); column <= slots; ++column) {
    const double sum = before[column] + after[slots - column];
    if (sum > *key) {
      *key = sum;
      best = column;
    }
  }
  return best;
}

void LeaveOneOut::split(const Chain& left, size_t num_left, size_t num_after, int32_t slots,
                        std::vector<int32_t>* allocation) const {
  double key;
  const int32_t column = meeting(left, num_left, num_after, slots, &key);
  left.trace(prefix_rows_, num_left, column, allocation->data());
  trace_suffix(num_after, slots - column, allocation);
}

void LeaveOneOut::trace_suffix(size_t num_after, int32_t column, std::vector<int32_t>* allocation) const {
  std::vector<int32_t> reversed(num_after);
  suffix_.trace(suffix_rows_, num_after, column, reversed.data());
  std::copy(reversed.begin(), reversed.end(), allocation->rbegin());
}

// All alternatives of one pool and one horizon, in an order in which each task is left out once.
template <class Receive>
void solve_pool(const Problem& problem, std::vector<Member> members, const Receive& receive) {
  constexpr size_t kDirectMax = 2;  // below this, prefix and suffix would not pay
  if (members.size() <= kDirectMax || problem.num_tasks() == 0) {
    for (const Member& member : members) receive(member, solve_alternative(problem, *member.alternative));
    return;
  }
  const Alternative& any = *members.front().alternative;
  LeaveOneOut sums(problem, any.pool, problem.running_s(any));
  const auto task_of = [](const Member& member) {
    const auto& overrides = member.alternative->overrides;
    return overrides.size() == 1 ? overrides.front().task : int32_t{-1};
  };
  std::stable_sort(members.begin(), members.end(),
                   [&](const Member& a, const Member& b) { return task_of(a) < task_of(b); });
  int32_t left_out = -1;
  for (const Member& member : members) {
    const auto& overrides = member.alternative->overrides;
    if (overrides.empty()) {
      receive(member, sums.unchanged());
    } else if (overrides.size() > 1) {
      receive(member, sums.several_changed(overrides));
    } else {
      if (left_out != overrides.front().task) sums.leave_out(static_cast<size_t>(overrides.front().task));
      left_out = overrides.front().task;
      receive(member, sums.one_changed(overrides.front()));
    }
  }
}

}  // namespace

PlanTable::PlanTable(const Problem& problem, const std::vector<std::vector<Alternative>>& events)
    : plans_(events.size()) {
  if (events.size() > kEventsMax) {
    throw Error(ErrorCode::kLimitExceeded, "more than " + std::to_string(kEventsMax) + " events in a plan table");
  }
  std::map<std::pair<int32_t, double>, std::vector<Member>> pools;  // by pool and horizon
  for (size_t event = 0; event < events.size(); ++event) {
    for (size_t index = 0; index < events[event].size(); ++index) {
      problem.check(events[event][index]);
      const Alternative& alternative = events[event][index];
      pools[{alternative.pool, problem.running_s(alternative)}].push_back(
          {event, static_cast<int32_t>(index), &alternative});
    }
  }
  std::vector<bool> has_plan(events.size());
  for (auto& [pool, members] : pools) {
    solve_pool(problem, std::move(members), [&](const Member& member, Solution&& solution) {
      if (solution.key == kNever) return;
      Plan plan = make_plan(problem, *member.alternative, member.index, std::move(solution));
      Plan& best = plans_[member.event];
      const bool ties_earlier = has_plan[member.event] && !is_better(best, plan) && plan.alternative < best.alternative;
      if (!has_plan[member.event] || is_better(plan, best) || ties_earlier) best = std::move(plan);
      has_plan[member.event] = true;
    });
  }
  const auto missing = std::find(has_plan.begin(), has_plan.end(), false);
  if (missing != has_plan.end()) {
    throw Error(ErrorCode::kInvalidArgument,
                "event " + std::to_string(missing - has_plan.begin()) + ": no alternative has a plan");
  }
}

const Plan& PlanTable::lookup(int64_t event) const {
  if (event < 0 || static_cast<size_t>(event) >= plans_.size()) {
    throw Error(ErrorCode::kInvalidArgument, "no event " + std::to_string(event) + " in the plan table");
  }
  return plans_[static_cast<size_t>(event)];
}

}  // namespace unicron::planner
