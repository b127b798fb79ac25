// The arithmetic that must give the same bits on a CPU and on a GPU: the digest of words and the exact sums.
//
// Included by the kernels and by the CPU's reference, so there is one text of it. Everything here is integer
// arithmetic, products by powers of two, or one correctly rounded conversion; nothing depends on order.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define UNICRON_HOST_DEVICE __host__ __device__ inline
#else
#define UNICRON_HOST_DEVICE inline
#endif

namespace unicron::gpu {

// ---------------------------------------------------------------- digest

// One 64-bit word at its place, mixed. A digest is the sum of these modulo 2^64: pieces can be summed in any order and
// by any number of threads, and the digests of neighbouring pieces add up to the whole's.
UNICRON_HOST_DEVICE uint64_t mixed_word(uint64_t word, uint64_t word_index) {
  uint64_t value = word + (word_index + 1) * 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93;
  value = (value ^ (value >> 32)) * 0xD6E8FEB86659FD93;
  return value ^ (value >> 32);
}

// ---------------------------------------------------------------- exact sums

// What a kernel found wrong, or'ed together.
constexpr uint64_t kNotFinite = 1;
constexpr uint64_t kAboveLimit = 2;  // a term above the limit: the sum could overflow; take a smaller scale

// A 128-bit sum as four 32-bit parts, each in a 64-bit word of its own, so that adding needs no carry between them:
// up to 2^32 terms can be added before a part overflows.
constexpr int kWideParts = 4;

UNICRON_HOST_DEVICE bool is_within(double value, double limit) { return value >= -limit && value <= limit; }

}  // namespace unicron::gpu
