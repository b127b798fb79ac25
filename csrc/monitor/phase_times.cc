#include "monitor/phase_times.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "base/error.h"

namespace unicron::monitor {

namespace {

constexpr int kSamplesMin = 2;
constexpr int kFewSamples = 8;          // of so few the longest is the usual
constexpr double kWidening = 3.0;       // standard deviations
constexpr double kForgetting = 0.9998;  // per interval: half in 3465
constexpr double kExtremeMax = 10.0;    // times the usual: one stall that was survived must not hide the next
constexpr double kAboveExtreme = 1.25;  // to suspect; twice that part above it to be sure

size_t require_stage(int64_t stage) {
  if (stage < 0 || stage >= PhaseTimes::kStagesMax) {
    throw Error(ErrorCode::kInvalidArgument, "stage " + std::to_string(stage) + " is outside 0 to " +
                                                 std::to_string(PhaseTimes::kStagesMax - 1) +
                                                 "; see unicron.types.Stage");
  }
  return static_cast<size_t>(stage);
}

}  // namespace

PhaseTimes::PhaseTimes(double sure_factor, double floor_ms) : sure_factor_(sure_factor), floor_ms_(floor_ms) {
  if (!(sure_factor > 1.0) || !(floor_ms >= 0.0)) {
    throw Error(ErrorCode::kInvalidArgument, "the factor must be above 1 and the floor 0 ms or more");
  }
}

void PhaseTimes::add(int64_t stage, double ms) {
  Phase& phase = phases_[require_stage(stage)];
  if (!(ms >= 0.0)) return;  // a clock that went back tells nothing
  phase.window.add(ms);
  phase.extreme_ms = std::max(ms, phase.extreme_ms * kForgetting);
}

std::optional<PhaseBudget> PhaseTimes::budget(int64_t stage) const {
  const Phase& phase = phases_[require_stage(stage)];
  const int number = phase.window.size();
  if (number < kSamplesMin) return std::nullopt;
  double usual_ms = phase.window.max(number);
  if (number >= kFewSamples) {
    const double median_ms = phase.window.median(number);
    usual_ms = std::min(median_ms + kWidening * phase.window.spread(number, median_ms), usual_ms);
    usual_ms = std::max(usual_ms, median_ms);
  }
  const double extreme_ms = std::min(phase.extreme_ms, kExtremeMax * usual_ms);
  const double suspect_factor = std::min(kSuspectFactor, sure_factor_);
  PhaseBudget budget{};
  budget.usual_ms = usual_ms;
  budget.suspect_ms = std::max({floor_ms_, suspect_factor * usual_ms, kAboveExtreme * extreme_ms});
  budget.sure_ms = std::max({budget.suspect_ms, sure_factor_ * usual_ms, (2 * kAboveExtreme - 1) * extreme_ms});
  return budget;
}

Stall PhaseTimes::judge(int64_t stage, double stood_ms) const {
  const std::optional<PhaseBudget> known = budget(stage);
  if (!known.has_value() || stood_ms <= known->suspect_ms) return Stall::kNone;
  return stood_ms > known->sure_ms ? Stall::kSure : Stall::kSuspect;
}

}  // namespace unicron::monitor
