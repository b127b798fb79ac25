#include "state/exact_sum.h"

#include <cmath>
#include <cstring>
#include <string>

#include "base/error.h"
#include "gpu/driver.h"
#include "gpu/kernels.h"

namespace unicron::state {

namespace {

constexpr int kExponentMax = 1000;
constexpr double kSumMax = 4611686018427387904.0;  // 2^62

float widened(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

uint64_t finding(double term) { return std::isfinite(term) ? gpu::kAboveLimit : gpu::kNotFinite; }

template <class Value, class Widen>
uint64_t accumulate(int64_t* sums, const Value* terms, size_t count, const Scale& scale, const Widen& widen) {
  uint64_t flags = 0;
  for (size_t i = 0; i < count; ++i) {
    const double term = static_cast<double>(widen(terms[i])) * scale.factor;
    if (gpu::is_within(term, scale.limit)) {
      sums[i] += std::llrint(term);  // to nearest, ties to even: the default rounding, which nobody here changes
    } else {
      flags |= finding(term);
    }
  }
  return flags;
}

float inverse_of(const Scale& scale) {
  const auto inverse = static_cast<float>(1.0 / scale.factor);
  if (!std::isnormal(inverse)) {
    throw Error(ErrorCode::kInvalidArgument,
                "sums of this scale cannot be given back as floats; take one of 2^-126 to "
                "2^126");
  }
  return inverse;
}

}  // namespace

Scale make_scale(int exponent, int64_t num_terms) {
  if (exponent < -kExponentMax || exponent > kExponentMax || num_terms <= 0) {
    throw Error(ErrorCode::kInvalidArgument, "a scale of 2^" + std::to_string(exponent) + " for " +
                                                 std::to_string(num_terms) + " terms cannot be used");
  }
  return {std::ldexp(1.0, exponent), kSumMax / static_cast<double>(num_terms)};
}

uint64_t accumulate_f32(int64_t* sums, const float* terms, size_t count, const Scale& scale) {
  return accumulate(sums, terms, count, scale, [](float value) { return value; });
}

uint64_t accumulate_bf16(int64_t* sums, const uint16_t* terms, size_t count, const Scale& scale) {
  return accumulate(sums, terms, count, scale, widened);
}

void to_float(float* values, const int64_t* sums, size_t count, const Scale& scale) {
  const float inverse = inverse_of(scale);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>(sums[i]) * inverse;
}

uint64_t sum_squares(WideSum* sum, const float* values, size_t count, const Scale& scale) {
  uint64_t flags = 0;
  uint64_t low = 0;
  uint64_t high = 0;
  for (size_t i = 0; i < count; ++i) {
    const double square = static_cast<double>(values[i]) * values[i] * scale.factor;
    if (!gpu::is_within(square, scale.limit)) {
      flags |= finding(square);
      continue;
    }
    const auto term = static_cast<uint64_t>(std::llrint(square));
    low += term;
    high += low < term ? 1 : 0;
  }
  const uint64_t parts[gpu::kWideParts] = {low & 0xffffffff, low >> 32, high & 0xffffffff, high >> 32};
  for (int i = 0; i < gpu::kWideParts; ++i) sum->parts[i] += parts[i];
  return flags;
}

double wide_value(const WideSum& sum, const Scale& scale) {
  // Carries first, so that equal sums are equal words whatever the grouping was; then one rounding.
  uint64_t words[gpu::kWideParts] = {};
  uint64_t carry = 0;
  for (int i = 0; i < gpu::kWideParts; ++i) {
    const uint64_t part = sum.parts[i] + carry;
    words[i] = part & 0xffffffff;
    carry = part >> 32;
  }
  const uint64_t low = words[0] | words[1] << 32;
  const uint64_t high = words[2] | words[3] << 32;
  // The low half's bits below the result's last one are folded into one sticky bit when the high half has bits enough.
  if (high == 0) return static_cast<double>(low) / scale.factor;
  const int shift = __builtin_clzll(high);
  const uint64_t top = shift == 0 ? high : high << shift | low >> (64 - shift);
  const uint64_t below = shift == 0 ? low : low << shift;
  return std::ldexp(static_cast<double>(top | (below != 0 ? 1 : 0)), 64 - shift) / scale.factor;
}

void gpu_accumulate(int device, gpu::DevicePointer sums, gpu::DevicePointer terms, size_t count, bool is_bf16,
                    const Scale& scale, gpu::DevicePointer flags, gpu::Stream stream) {
  const gpu::ScopedDevice current(device);
  double factor = scale.factor;
  double limit = scale.limit;
  void* arguments[] = {&sums, &terms, &count, &factor, &limit, &flags};
  gpu::launch(device, is_bf16 ? "unicron_accumulate_bf16" : "unicron_accumulate_f32", count, stream, arguments);
}

void gpu_to_float(int device, gpu::DevicePointer values, gpu::DevicePointer sums, size_t count, const Scale& scale,
                  gpu::Stream stream) {
  const gpu::ScopedDevice current(device);
  float inverse = inverse_of(scale);
  void* arguments[] = {&values, &sums, &count, &inverse};
  gpu::launch(device, "unicron_to_float", count, stream, arguments);
}

void gpu_sum_squares(int device, gpu::DevicePointer parts, gpu::DevicePointer values, size_t count, const Scale& scale,
                     gpu::DevicePointer flags, gpu::Stream stream) {
  const gpu::ScopedDevice current(device);
  double factor = scale.factor;
  double limit = scale.limit;
  void* arguments[] = {&parts, &values, &count, &factor, &limit, &flags};
  gpu::launch(device, "unicron_sum_squares", count, stream, arguments);
}

}  // namespace unicron::state
