#include "base/time.h"

#include <algorithm>
#include <limits>

namespace unicron {

namespace {
constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kNsPerSecond = 1'000'000'000;
constexpr int64_t kTimeoutMsMax = int64_t{1000} * 3600 * 24 * 365;  // a year: keeps the sum below from overflowing
}  // namespace

MonotonicTime monotonic_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);  // cannot fail for this clock
  return MonotonicTime{int64_t{now.tv_sec} * kNsPerSecond + now.tv_nsec};
}

Deadline Deadline::after_ms(MonotonicTime now, int64_t timeout_ms) {
  const int64_t bounded_ms = std::clamp(timeout_ms, int64_t{0}, kTimeoutMsMax);
  return Deadline(MonotonicTime{now.ns + bounded_ms * kNsPerMs});
}

int Deadline::remaining_ms(MonotonicTime now) const {
  if (is_past(now)) return 0;
  const int64_t remaining = (at_.ns - now.ns + kNsPerMs - 1) / kNsPerMs;
  return static_cast<int>(std::min<int64_t>(remaining, std::numeric_limits<int>::max()));
}

timespec to_timespec(MonotonicTime time) {
  timespec result{};
  result.tv_sec = static_cast<time_t>(time.ns / kNsPerSecond);
  result.tv_nsec = static_cast<long>(time.ns % kNsPerSecond);
  return result;
}

}  // namespace unicron
