// Every kernel of unicron. Compiled to one image by nvcc (cmake/UnicronCuda.cmake), loaded by gpu/kernels.cc.
//
// Plain grid-stride loops: each is bound by memory or by NVLink, and any grid gives the same bits, because everything
// that crosses threads is an integer sum.
#include <cuda_bf16.h>

#include <cstdint>

#include "gpu/arithmetic.h"

using namespace unicron::gpu;

namespace {

using Word = unsigned long long;

constexpr unsigned kWholeWarp = 0xffffffff;

__device__ size_t first_index() { return blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; }
__device__ size_t index_stride() { return gridDim.x * static_cast<size_t>(blockDim.x); }

__device__ Word sum_of_warp(Word value) {
  for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_down_sync(kWholeWarp, value, lanes);
  return value;
}

__device__ void add_to(Word* total, Word value) {
  value = sum_of_warp(value);
  if (threadIdx.x % 32 == 0) atomicAdd(total, value);
}

// Rare, so it costs nothing where nothing is wrong.
__device__ void raise(Word* flags, Word found) {
  if (found != 0) atomicOr(flags, found);
}

__device__ Word mixed_pair(uint4 pair, size_t pair_index) {
  const Word low = static_cast<Word>(pair.y) << 32 | pair.x;
  const Word high = static_cast<Word>(pair.w) << 32 | pair.z;
  return mixed_word(low, 2 * pair_index) + mixed_word(high, 2 * pair_index + 1);
}

// Bytes after the last pair, zero-filled to words.
__device__ Word mixed_rest(const uint4* from, size_t num_bytes, Word first_word) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  Word sum = 0;
  for (size_t at = num_bytes / 16 * 16; at < num_bytes; at += 8) {
    Word word = 0;
    for (size_t i = 0; i < 8 && at + i < num_bytes; ++i) word |= static_cast<Word>(bytes[at + i]) << 8 * i;
    sum += mixed_word(word, first_word + at / 8);
  }
  return sum;
}

template <bool kCopies>
__device__ void digest_body(const uint4* from, uint4* to, size_t num_bytes, Word first_word, Word* total) {
  const size_t num_pairs = num_bytes / 16;
  const size_t stride = index_stride();
  const Word first_pair = first_word / 2;
  Word sum = 0;
  size_t i = first_index();
  // Four loads in flight before the first use: one is not enough to fill NVLink.
  for (; i + 3 * stride < num_pairs; i += 4 * stride) {
    const uint4 a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
    if (kCopies) to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
    sum += mixed_pair(a, first_pair + i) + mixed_pair(b, first_pair + i + stride) +
           mixed_pair(c, first_pair + i + 2 * stride) + mixed_pair(d, first_pair + i + 3 * stride);
  }
  for (; i < num_pairs; i += stride) {
    const uint4 a = from[i];
    if (kCopies) to[i] = a;
    sum += mixed_pair(a, first_pair + i);
  }
  add_to(total, sum);
}

__device__ double to_double(float value) { return value; }
__device__ double to_double(__nv_bfloat16 value) { return __bfloat162float(value); }

template <class Value>
__device__ void accumulate_body(long long* sums, const Value* terms, size_t count, double scale, double limit,
                                Word* flags) {
  Word found = 0;
  for (size_t i = first_index(); i < count; i += index_stride()) {
    const double term = to_double(terms[i]) * scale;
    if (is_within(term, limit)) {
      sums[i] += __double2ll_rn(term);
    } else {
      found |= isfinite(term) ? kAboveLimit : kNotFinite;
    }
  }
  raise(flags, found);
}

}  // namespace

// `first_word` is even, `from` is a multiple of 16.
extern "C" __global__ void unicron_digest(const uint4* from, size_t num_bytes, Word first_word, Word* total) {
  digest_body<false>(from, nullptr, num_bytes, first_word, total);
  if (first_index() == 0 && num_bytes % 16 != 0) atomicAdd(total, mixed_rest(from, num_bytes, first_word));
}

// Also `to` and `num_bytes` are multiples of 16.
extern "C" __global__ void unicron_copy_digest(const uint4* from, uint4* to, size_t num_bytes, Word first_word,
                                               Word* total) {
  digest_body<true>(from, to, num_bytes, first_word, total);
}

extern "C" __global__ void unicron_accumulate_f32(long long* sums, const float* terms, size_t count, double scale,
                                                  double limit, Word* flags) {
  accumulate_body(sums, terms, count, scale, limit, flags);
}

extern "C" __global__ void unicron_accumulate_bf16(long long* sums, const __nv_bfloat16* terms, size_t count,
                                                   double scale, double limit, Word* flags) {
  accumulate_body(sums, terms, count, scale, limit, flags);
}

extern "C" __global__ void unicron_to_float(float* values, const long long* sums, size_t count, float inverse_scale) {
  for (size_t i = first_index(); i < count; i += index_stride()) values[i] = __ll2float_rn(sums[i]) * inverse_scale;
}

// The sum of squares as a 128-bit integer. A square of a float is exact in a double; only its conversion rounds.
extern "C" __global__ void unicron_sum_squares(Word* parts, const float* values, size_t count, double scale,
                                               double limit, Word* flags) {
  Word found = 0;
  Word low = 0;
  Word high = 0;
  for (size_t i = first_index(); i < count; i += index_stride()) {
    const double square = static_cast<double>(values[i]) * values[i] * scale;
    if (!is_within(square, limit)) {
      found |= isfinite(square) ? kAboveLimit : kNotFinite;
      continue;
    }
    const Word term = static_cast<Word>(__double2ll_rn(square));
    low += term;
    high += low < term;
  }
  raise(flags, found);
  const Word part[kWideParts] = {low & 0xffffffff, low >> 32, high & 0xffffffff, high >> 32};
  for (int i = 0; i < kWideParts; ++i) add_to(parts + i, part[i]);
}
