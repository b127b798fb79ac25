#include "planner/relaxation.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

namespace unicron::planner {

namespace {

constexpr int64_t kPriceTimesPoolMax = int64_t{1} << 53;  // with sums of keys below 2^53, far from an overflow

struct Step {
  double price;  // key gained a slot
  int32_t width;
};

// The steps of the row's concave hull, dearest first.
void append_steps(const Row& row, std::vector<size_t>* hull, std::vector<Step>* steps) {
  const auto slope = [&row](size_t from, size_t to) {
    return (row.keys[to] - row.keys[from]) / (row.counts[to] - row.counts[from]);
  };
  hull->clear();
  for (size_t choice = 0; choice < row.counts.size(); ++choice) {
    while (hull->size() >= 2 && slope((*hull)[hull->size() - 2], hull->back()) <= slope(hull->back(), choice)) {
      hull->pop_back();
    }
    hull->push_back(choice);
  }
  for (size_t at = 1; at < hull->size(); ++at) {
    const size_t from = (*hull)[at - 1];
    const size_t to = (*hull)[at];
    steps->push_back({slope(from, to), row.counts[to] - row.counts[from]});
  }
}

// The price at which the steps that are worth it fill the pool. Any price gives a bound; this one the least.
int64_t price_of(const std::vector<Row>& rows, int32_t pool) {
  std::vector<Step> steps;
  std::vector<size_t> hull;
  int64_t left = pool;
  for (const Row& row : rows) {
    append_steps(row, &hull, &steps);
    if (!row.counts.empty()) left -= row.counts.front();
  }
  std::sort(steps.begin(), steps.end(), [](const Step& a, const Step& b) { return a.price > b.price; });
  double price = 0;
  for (const Step& step : steps) {
    price = step.price;
    left -= step.width;
    if (left <= 0) break;
  }
  if (left > 0) return 0;  // there is room for everybody's greatest count
  return static_cast<int64_t>(std::min(price, static_cast<double>(kPriceTimesPoolMax / std::max(pool, 1))));
}

}  // namespace

Relaxation::Relaxation(const std::vector<Row>& rows, int32_t pool) : price_(price_of(rows, pool)) {
  surplus_.reserve(rows.size());
  for (const Row& row : rows) {
    surplus_.push_back(surplus(row));
    total_ += surplus_.back();
  }
}

int64_t Relaxation::bound(const Alternative& alternative, const std::vector<Row>& changed) const {
  int64_t result = price_ * alternative.pool + total_;
  for (size_t at = 0; at < changed.size(); ++at) {
    result += surplus(changed[at]) - surplus_[static_cast<size_t>(alternative.overrides[at].task)];
  }
  return result;
}

int64_t Relaxation::gap_guess(int32_t pool) const {
  constexpr int64_t kPartsOfTask = 128;
  return std::abs(price_ * pool + total_) / (kPartsOfTask * static_cast<int64_t>(std::max<size_t>(surplus_.size(), 1)));
}

Row Relaxation::within(const Row& row, size_t task, int64_t gap) const {
  Row result;
  result.current = row.current;
  for (size_t choice = 0; choice < row.counts.size(); ++choice) {
    if (static_cast<int64_t>(row.keys[choice]) - price_ * row.counts[choice] < surplus_[task] - gap) continue;
    result.counts.push_back(row.counts[choice]);
    result.keys.push_back(row.keys[choice]);
  }
  return result;
}

int64_t Relaxation::surplus(const Row& row) const {
  if (row.counts.empty()) return 0;  // it has no plan, so any bound is one
  int64_t best = std::numeric_limits<int64_t>::min();
  for (size_t choice = 0; choice < row.counts.size(); ++choice) {
    best = std::max(best, static_cast<int64_t>(row.keys[choice]) - price_ * row.counts[choice]);
  }
  return best;
}

}  // namespace unicron::planner
