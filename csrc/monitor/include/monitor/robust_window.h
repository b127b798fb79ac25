// The last 64 samples of one quantity: where they lie and how far they spread, whatever a few of them do.
//
// Median and median deviations instead of mean and variance: one pause of a garbage collector must not move what is
// usual. Memory is fixed; a look costs about a microsecond.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace unicron::monitor {

class RobustWindow {
 public:
  static constexpr int kSize = 64;

  // `label` comes back from since(): the iteration, say.
  void add(double value, int64_t label = 0);
  void clear() { *this = RobustWindow(); }

  int64_t count() const { return count_; }  // ever added
  int size() const { return count_ < kSize ? static_cast<int>(count_) : kSize; }
  // All below look at the newest `newest` samples (those there are, when there are fewer; at least one must be there).
  // age: without so many newer ones, that is, as it was so many samples ago.
  double median(int newest, int age = 0) const;
  double max(int newest) const;
  // Standard deviation of one sample, from the differences of neighbours: a single step of the level does not show.
  double noise(int newest) const;
  // From the fifth to the ninety-fifth of a hundred, of those with `age` newer ones or more.
  double range(int age) const;
  // Standard deviation, from the distances to `center`.
  double spread(int newest, double center) const;
  // Label of the first sample of the run, up to now, of which three quarters are above `level`.
  int64_t since(double level) const;

 private:
  double at(int age) const { return values_[static_cast<std::size_t>((count_ - 1 - age) % kSize)]; }  // 0: the newest
  int bounded(int newest) const { return newest < size() ? newest : size(); }

  int64_t count_ = 0;
  std::array<double, kSize> values_{};
  std::array<int64_t, kSize> labels_{};
};

}  // namespace unicron::monitor
