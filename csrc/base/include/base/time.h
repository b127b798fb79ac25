// Time as a value: a point on CLOCK_MONOTONIC and a deadline computed from it.
//
// Code that decides takes `now` as an argument; only the edges call monotonic_now(). All processes of a machine share
// this clock, so a time written into a shared page can be compared by its reader.
#pragma once

#include <time.h>

#include <cstdint>

namespace unicron {

struct MonotonicTime {
  int64_t ns = 0;
};

MonotonicTime monotonic_now();

class Deadline {
 public:
  // A negative timeout counts as 0: no wait is without a bound.
  static Deadline after_ms(MonotonicTime now, int64_t timeout_ms);

  bool is_past(MonotonicTime now) const { return now.ns >= at_.ns; }
  // Rounded up, so that a poll() with it does not spin through the last millisecond.
  int remaining_ms(MonotonicTime now) const;
  MonotonicTime at() const { return at_; }

 private:
  explicit Deadline(MonotonicTime at) : at_(at) {}
  MonotonicTime at_;
};

timespec to_timespec(MonotonicTime time);

}  // namespace unicron
