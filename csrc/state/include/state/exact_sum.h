// Exact mode's sums: gradients as fixed-point integers, whose sum depends neither on order nor on grouping.
//
// A term is multiplied by a power of two and rounded to the nearest integer, once; sums of integers are exact. The
// CPU's and the GPU's functions give the same bits (tests/gpu compares them). What cannot be represented is not added
// and raises a flag: kNotFinite, or kAboveLimit when a term is so large that the sum could overflow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/arithmetic.h"
#include "gpu/driver_api.h"

namespace unicron::state {

struct Scale {
  double factor = 1.0;  // a power of two
  double limit = 0.0;   // of one scaled term; at most 2^62 divided by the number of terms of a sum
};

// |term| <= limit for a sum of `num_terms`; throws unless -1000 <= exponent <= 1000 and num_terms is positive.
Scale make_scale(int exponent, int64_t num_terms);

// A 128-bit integer as four 32-bit parts in 64-bit words (see gpu/arithmetic.h).
struct WideSum {
  uint64_t parts[gpu::kWideParts] = {};
};

// sums[i] += round(terms[i] * factor); returns flags.
uint64_t accumulate_f32(int64_t* sums, const float* terms, size_t count, const Scale& scale);
uint64_t accumulate_bf16(int64_t* sums, const uint16_t* terms, size_t count, const Scale& scale);
// values[i] = sums[i] / factor, rounded to nearest. Throws unless 1 / factor is a normal float.
void to_float(float* values, const int64_t* sums, size_t count, const Scale& scale);
// sum += round(values[i]^2 * factor); returns flags.
uint64_t sum_squares(WideSum* sum, const float* values, size_t count, const Scale& scale);
// The sum divided by the factor, rounded once.
double wide_value(const WideSum& sum, const Scale& scale);

// The same on a GPU, in the order of `stream` and without waiting; every pointer is the GPU's, `flags` one word that
// findings are or'ed into, `parts` four words that are added to.
void gpu_accumulate(int device, gpu::DevicePointer sums, gpu::DevicePointer terms, size_t count, bool is_bf16,
                    const Scale& scale, gpu::DevicePointer flags, gpu::Stream stream);
void gpu_to_float(int device, gpu::DevicePointer values, gpu::DevicePointer sums, size_t count, const Scale& scale,
                  gpu::Stream stream);
void gpu_sum_squares(int device, gpu::DevicePointer parts, gpu::DevicePointer values, size_t count, const Scale& scale,
                     gpu::DevicePointer flags, gpu::Stream stream);

}  // namespace unicron::state
