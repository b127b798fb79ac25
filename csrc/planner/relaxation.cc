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
  size_t from;  // choice
};

// Appends the steps of the row's concave hull, dearest first.
void append_steps(const Row& row, std::vector<Step>* steps) {
  const size_t begin = steps->size();
  for (size_t choice = 1; choice < row.counts.size(); ++choice) {
    Step step{0, 0, choice - 1};
    while (true) {
      step.width = row.counts[choice] - row.counts[step.from];
      step.price = (row.keys[choice] - row.keys[step.from]) / step.width;
      if (steps->size() == begin || steps->back().price > step.price) break;
      step.from = steps->back().from;
      steps->pop_back();
    }
    steps->push_back(step);
  }
}

// The price at which the steps that are worth it fill the pool. Any price gives a bound; this one the least.
int64_t price_of(const std::vector<Row>& rows, int32_t pool) {
  std::vector<Step> steps;
  int64_t left = pool;
  for (const Row& row : rows) {
    append_steps(row, &steps);
    if (!row.counts.empty()) left -= row.counts.front();
  }
  // The weighted median's way: half of what is left is decided at once.
  auto first = steps.begin();
  auto last = steps.end();
  double price = 0;
  while (first != last) {
    const auto middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, [](const Step& a, const Step& b) { return a.price > b.price; });
    int64_t width = 0;
    for (auto step = first; step <= middle; ++step) width += step->width;
    if (width >= left) {
      price = middle->price;
      last = middle;
    } else {
      left -= width;
      first = middle + 1;
    }
  }
  // Still 0 where there is room for everybody's greatest count.
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
  constexpr int64_t kPartsOfTask = 64;
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
