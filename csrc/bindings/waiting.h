// Blocking waits that still let Python handle Ctrl-C.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>

#include "base/time.h"

namespace unicron::bindings {

constexpr int64_t kWaitSliceMs = 200;

// Calls `wait(slice_ms)` without the GIL until its result is true-ish or `timeout_ms` are over. A signal handler of
// Python runs between slices, because native threads never can run it.
template <class Wait>
auto wait_in_slices(int64_t timeout_ms, const Wait& wait) {
  const Deadline deadline = Deadline::after_ms(monotonic_now(), timeout_ms);
  while (true) {
    const int64_t remaining_ms = deadline.remaining_ms(monotonic_now());
    auto result = [&] {
      const pybind11::gil_scoped_release release;
      return wait(std::min(remaining_ms, kWaitSliceMs));
    }();
    if (result || remaining_ms <= kWaitSliceMs) return result;
    if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  }
}

// The deleter of objects with native threads. In a forked child those threads do not exist, and whatever they had
// locked stays locked: destroying the object there would wait for ever, so it is left to the end of the process.
template <class T>
struct DeleteUnlessForked {
  void operator()(T* object) const {
    if (!object->is_foreign()) delete object;
  }
};

}  // namespace unicron::bindings
