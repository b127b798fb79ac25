#include "monitor/robust_window.h"

#include <algorithm>
#include <cmath>

namespace unicron::monitor {

namespace {

constexpr double kDeviation = 1.4826;  // standard deviation of a normal distribution over its median deviation

double median_of(double* values, int number) {
  if (number == 0) return 0.0;
  double* middle = values + number / 2;
  std::nth_element(values, middle, values + number);
  if (number % 2 == 1) return *middle;
  return (*middle + *std::max_element(values, middle)) / 2.0;
}

}  // namespace

void RobustWindow::add(double value, int64_t label) {
  const auto index = static_cast<size_t>(count_ % kSize);
  values_[index] = value;
  labels_[index] = label;
  ++count_;
}

double RobustWindow::median(int newest, int age) const {
  double values[kSize];
  const int number = std::max(bounded(newest + age) - age, 0);
  for (int index = 0; index < number; ++index) values[index] = at(index + age);
  return median_of(values, number);
}

double RobustWindow::max(int newest) const {
  double result = at(0);
  for (int age = 1; age < bounded(newest); ++age) result = std::max(result, at(age));
  return result;
}

double RobustWindow::noise(int newest) const {
  double differences[kSize];
  const int number = bounded(newest) - 1;
  for (int age = 0; age < number; ++age) differences[age] = std::abs(at(age) - at(age + 1));
  return kDeviation * median_of(differences, std::max(number, 0)) / std::sqrt(2.0);
}

double RobustWindow::range(int age) const {
  double values[kSize];
  const int number = std::max(size() - age, 0);
  if (number == 0) return 0.0;
  for (int index = 0; index < number; ++index) values[index] = at(index + age);
  std::sort(values, values + number);
  const int cut = number / 20;
  return values[number - 1 - cut] - values[cut];
}

double RobustWindow::spread(int newest, double center) const {
  double distances[kSize];
  const int number = bounded(newest);
  for (int age = 0; age < number; ++age) distances[age] = std::abs(at(age) - center);
  return kDeviation * median_of(distances, number);
}

int64_t RobustWindow::since(double level) const {
  int64_t label = size() > 0 ? labels_[static_cast<size_t>((count_ - 1) % kSize)] : 0;
  int above = 0;
  for (int age = 0; age < size(); ++age) {
    if (at(age) <= level) continue;
    ++above;
    if (4 * above >= 3 * (age + 1)) label = labels_[static_cast<size_t>((count_ - 1 - age) % kSize)];
  }
  return label;
}

}  // namespace unicron::monitor
