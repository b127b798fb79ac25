#include "planner/plan_table.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "base/error.h"
#include "planner/leave_one_out.h"

namespace unicron::planner {

namespace {

struct Member {
  size_t event;
  int32_t index;  // of the alternative in its event
  const Alternative* alternative;
};

constexpr int32_t kNoTask = -1;
constexpr int64_t kNoGapMax = INT64_MAX;  // every count is within it

int32_t task_of(const Member& member) {
  const auto& overrides = member.alternative->overrides;
  return overrides.size() == 1 ? overrides.front().task : kNoTask;
}

// What has been found for each event, while horizon after horizon is solved.
class Found {
 public:
  Found(const Problem& problem, size_t num_events) : problem_(problem), entries_(num_events) {}

  // Takes the alternative's plan if it is better than what its event has. The allocation may follow later.
  void offer(const Member& member, Solution&& solution, int32_t count) {
    if (solution.key == kNever) return;
    Entry& entry = entries_[member.event];
    const Best best{solution.key, count};
    Plan plan = make_plan(problem_, *member.alternative, member.index, std::move(solution));
    const bool ties_earlier = !is_better(entry.plan, plan) && plan.alternative < entry.plan.alternative;
    if (entry.has_plan && !is_better(plan, entry.plan) && !ties_earlier) return;
    entry.best = best;
    entry.plan = std::move(plan);
    entry.has_plan = true;
  }

  // Is the event's plan better than whatever earns at most `reward_flop` before the alternative's cost?
  bool is_beaten(const Member& member, double reward_flop) const {
    const Entry& entry = entries_[member.event];
    return entry.has_plan && entry.plan.reward_flop > reward_flop - member.alternative->cost_flop;
  }

  // Plans without an allocation get it now; most alternatives lose, and never do.
  void complete(const std::vector<Member>& members, LeaveOneOut* sums) {
    for (const Member& member : members) {
      Entry& entry = entries_[member.event];
      if (!entry.has_plan || entry.plan.alternative != member.index || !entry.plan.allocation.empty()) continue;
      entry.plan.allocation = sums->allocation(*member.alternative, entry.best);
    }
  }

  std::vector<Plan> plans() && {
    std::vector<Plan> result;
    for (Entry& entry : entries_) {
      if (!entry.has_plan) {
        const size_t event = result.size();
        throw Error(ErrorCode::kInvalidArgument, "event " + std::to_string(event) + ": no alternative has a plan");
      }
      result.push_back(std::move(entry.plan));
    }
    return result;
  }

 private:
  struct Entry {
    Plan plan;
    Best best;
    bool has_plan = false;
  };

  const Problem& problem_;
  std::vector<Entry> entries_;
};

// All alternatives of one horizon. Healthy tasks keep only counts near their best at the relaxation's price; an answer
// within that distance of its bound cannot be beaten by one with other counts. The few that are further off are tried
// again with more counts, at last with all.
class Horizon {
 public:
  Horizon(const Problem& problem, double running_s, std::vector<Member> members);
  void solve(LeaveOneOut::Workspace* workspace, Found* found);

 private:
  // Answers what can be said for certain with counts within the gap, and takes it out of the list.
  void settle(int64_t gap, LeaveOneOut::Workspace* workspace, Found* found);
  std::vector<Row> rows_within(int64_t gap) const;

  const Problem& problem_;
  Scale scale_;
  std::vector<Member> members_;  // not answered yet, in an order in which each task is left out once
  Pools pools_{INT32_MAX, 0};
  int64_t overrides_max_ = 0;
  std::vector<Row> rows_;
  Relaxation relaxation_;
};

Horizon::Horizon(const Problem& problem, double running_s, std::vector<Member> members)
    : problem_(problem), scale_(problem.scale(running_s)), members_(std::move(members)) {
  for (const Member& member : members_) {
    const Alternative& alternative = *member.alternative;
    pools_.least = std::min(pools_.least, alternative.pool);
    pools_.most = std::max(pools_.most, alternative.pool);
    int64_t slots = 0;
    for (const Override& changed : alternative.overrides) {
      slots += problem.count_max(static_cast<size_t>(changed.task), alternative.pool);
    }
    overrides_max_ = std::max(overrides_max_, slots);
  }
  std::stable_sort(members_.begin(), members_.end(),
                   [](const Member& a, const Member& b) { return task_of(a) < task_of(b); });
}

void Horizon::solve(LeaveOneOut::Workspace* workspace, Found* found) {
  constexpr int kRounds = 3;
  constexpr int64_t kWiden = 8;
  constexpr size_t kDirectMax = 2;  // up to this many, prefix and suffix of all counts would not pay
  if (problem_.num_tasks() > 0) {
    for (size_t task = 0; task < problem_.num_tasks(); ++task) {
      rows_.push_back(problem_.healthy_row(task, pools_.most, scale_));
    }
    relaxation_ = Relaxation(rows_, pools_.most);
    int64_t gap = relaxation_.gap_guess(pools_.most);
    for (int round = 0; round < kRounds && !members_.empty(); ++round, gap *= kWiden) settle(gap, workspace, found);
    if (members_.size() > kDirectMax) settle(kNoGapMax, workspace, found);
  }
  for (const Member& member : members_) found->offer(member, solve_alternative(problem_, *member.alternative), 0);
}

void Horizon::settle(int64_t gap, LeaveOneOut::Workspace* workspace, Found* found) {
  LeaveOneOut sums(problem_, scale_, rows_within(gap), relaxation_, pools_, overrides_max_, workspace);
  std::vector<Member> open;
  for (const Member& member : members_) {
    const auto [best, bound] = sums.best(*member.alternative);
    if (gap == kNoGapMax || best.key >= static_cast<double>(bound - gap)) {
      found->offer(member, Solution{best.key, {}}, best.count);
    } else if (!found->is_beaten(member, scale_.reward_flop(static_cast<double>(bound)))) {
      open.push_back(member);
    }
  }
  found->complete(members_, &sums);
  members_ = std::move(open);
}

std::vector<Row> Horizon::rows_within(int64_t gap) const {
  if (gap == kNoGapMax) return rows_;
  std::vector<Row> result;
  for (size_t task = 0; task < rows_.size(); ++task) result.push_back(relaxation_.within(rows_[task], task, gap));
  return result;
}

}  // namespace

PlanTable::PlanTable(const Problem& problem, const std::vector<std::vector<const Alternative*>>& events) {
  if (events.size() > kEventsMax) {
    throw Error(ErrorCode::kLimitExceeded, "more than " + std::to_string(kEventsMax) + " events in a plan table");
  }
  std::map<double, std::vector<Member>> horizons;
  for (size_t event = 0; event < events.size(); ++event) {
    for (size_t index = 0; index < events[event].size(); ++index) {
      const Alternative* alternative = events[event][index];
      problem.check(*alternative);
      horizons[problem.running_s(*alternative)].push_back({event, static_cast<int32_t>(index), alternative});
    }
  }
  Found found(problem, events.size());
  LeaveOneOut::Workspace workspace;
  for (auto& [running_s, members] : horizons) {
    Horizon(problem, running_s, std::move(members)).solve(&workspace, &found);
  }
  plans_ = std::move(found).plans();
}

const Plan& PlanTable::lookup(int64_t event) const {
  if (event < 0 || static_cast<size_t>(event) >= plans_.size()) {
    throw Error(ErrorCode::kInvalidArgument, "no event " + std::to_string(event) + " in the plan table");
  }
  return plans_[static_cast<size_t>(event)];
}

}  // namespace unicron::planner
