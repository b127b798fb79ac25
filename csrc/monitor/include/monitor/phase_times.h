// How long a worker's loop usually stays at each stage, and from when on it stays too long (Unicron's statistical
// monitor: the average of normal iterations, 3 times that is a failure; here per stage and robust).
//
// usual    the median of the last intervals, widened by three of their standard deviations: 1.5 and 3 times a steady
//          phase, more of one that varies
// extreme  the longest interval that ended well, forgotten slowly: what this task has survived is no hang the next time
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "monitor/robust_window.h"

namespace unicron::monitor {

enum class Stall : uint8_t { kNone = 0, kSuspect = 1, kSure = 2 };

struct PhaseBudget {
  double usual_ms;
  double suspect_ms;  // enough where other evidence points the same way
  double sure_ms;     // enough without
};

class PhaseTimes {
 public:
  static constexpr int64_t kStagesMax = 16;
  static constexpr double kSuspectFactor = 1.5;

  // sure_factor: times the usual, for a verdict without other evidence; floor_ms: nothing shorter is a stall.
  PhaseTimes(double sure_factor, double floor_ms);

  // An interval that ended.
  void add(int64_t stage, double ms);
  // Nothing before two intervals of this stage are known.
  std::optional<PhaseBudget> budget(int64_t stage) const;
  Stall judge(int64_t stage, double stood_ms) const;

 private:
  struct Phase {
    RobustWindow window;
    double extreme_ms = 0.0;
  };

  double sure_factor_;
  double floor_ms_;
  std::array<Phase, kStagesMax> phases_{};
};

}  // namespace unicron::monitor
