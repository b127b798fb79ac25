#include "planner/max_plus.h"

#include <algorithm>

#include "planner/reward.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define UNICRON_X86_VECTORS
#include <immintrin.h>
#endif

namespace unicron::planner {

namespace {

constexpr int64_t kTile = kColumnsPad;  // columns that stay in registers

using Kernel = void (*)(const double* from, const Choices& choices, size_t num_choices, double* to);
using SumKernel = double (*)(const double* left, const double* right_last, int64_t size);

// One column, for ranges narrower than a tile.
double column(const double* from, const Choices& choices, int64_t at) {
  double best = kNever;
  for (size_t choice = 0; choice < choices.size && choices.counts[choice] <= at; ++choice) {
    best = std::max(best, from[at - choices.counts[choice]] + choices.keys[choice]);
  }
  return best;
}

// Each kernel fills to[0 ... kTile - 1]; `from` points at the tile's first column.
void tile_generic(const double* from, const Choices& choices, size_t num_choices, double* to) {
  double best[kTile];
  std::fill(best, best + kTile, kNever);
  for (size_t choice = 0; choice < num_choices; ++choice) {
    const double* source = from - choices.counts[choice];
    const double key = choices.keys[choice];
    for (int64_t at = 0; at < kTile; ++at) {
      const double candidate = source[at] + key;
      best[at] = candidate > best[at] ? candidate : best[at];
    }
  }
  std::copy(best, best + kTile, to);
}

double sum_generic(const double* left, const double* right_last, int64_t size) {
  double best = kNever;
  for (int64_t at = 0; at < size; ++at) {
    const double candidate = left[at] + right_last[-at];
    best = candidate > best ? candidate : best;
  }
  return best;
}

#ifdef UNICRON_X86_VECTORS

// AVX-512 machines take this too: the loads bound it.
__attribute__((target("avx2"))) double sum_avx2(const double* left, const double* right_last, int64_t size) {
  constexpr int kVectors = 4;
  __m256d best[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) best[v] = _mm256_set1_pd(kNever);
  int64_t at = 0;
  for (; at + 4 * kVectors <= size; at += 4 * kVectors) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m256d right = _mm256_permute4x64_pd(_mm256_loadu_pd(right_last - at - 4 * v - 3), 0x1b);
      best[v] = _mm256_max_pd(best[v], _mm256_add_pd(_mm256_loadu_pd(left + at + 4 * v), right));
    }
  }
  alignas(32) double lanes[4];
  _mm256_store_pd(lanes, _mm256_max_pd(_mm256_max_pd(best[0], best[1]), _mm256_max_pd(best[2], best[3])));
  const double most = std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
  return std::max(most, sum_generic(left + at, right_last - at, size - at));
}

__attribute__((target("avx2"))) void tile_avx2(const double* from, const Choices& choices, size_t num_choices,
                                               double* to) {
  constexpr int kVectors = kTile / 4;
  __m256d best[kVectors];
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) best[v] = _mm256_set1_pd(kNever);
  for (size_t choice = 0; choice < num_choices; ++choice) {
    const double* source = from - choices.counts[choice];
    const __m256d key = _mm256_set1_pd(choices.keys[choice]);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      best[v] = _mm256_max_pd(_mm256_add_pd(_mm256_loadu_pd(source + 4 * v), key), best[v]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) _mm256_storeu_pd(to + 4 * v, best[v]);
}

__attribute__((target("avx512f"))) void tile_avx512(const double* from, const Choices& choices, size_t num_choices,
                                                    double* to) {
  constexpr int kVectors = kTile / 8;
  __m512d best[kVectors];
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) best[v] = _mm512_set1_pd(kNever);
  for (size_t choice = 0; choice < num_choices; ++choice) {
    const double* source = from - choices.counts[choice];
    const __m512d key = _mm512_set1_pd(choices.keys[choice]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const __m512d candidate = _mm512_add_pd(_mm512_loadu_pd(source + 8 * v), key);
      best[v] = _mm512_mask_mov_pd(best[v], _mm512_cmp_pd_mask(candidate, best[v], _CMP_GT_OQ), candidate);
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) _mm512_storeu_pd(to + 8 * v, best[v]);
}

#endif

struct Chosen {
  Kernel kernel;
  SumKernel sum;
  const char* name;
};

Chosen choose() {
#ifdef UNICRON_X86_VECTORS
  if (__builtin_cpu_supports("avx512f")) return {tile_avx512, sum_avx2, "avx512f"};
  if (__builtin_cpu_supports("avx2")) return {tile_avx2, sum_avx2, "avx2"};
#endif
  return {tile_generic, sum_generic, "generic"};
}

const Chosen& chosen() {
  static const Chosen result = choose();
  return result;
}

void tile(const double* from, const Choices& choices, double* to, int64_t first) {
  // Counts above the tile's last column reach below column 0 everywhere.
  const int32_t* end = std::upper_bound(choices.counts, choices.counts + choices.size, first + kTile - 1);
  chosen().kernel(from + first, choices, static_cast<size_t>(end - choices.counts), to + first);
}

}  // namespace

void max_plus(const double* from, const Choices& choices, double* to, int64_t first, int64_t last) {
  if (last - first + 1 < kTile) {
    for (int64_t at = first; at <= last; ++at) to[at] = column(from, choices, at);
    return;
  }
  for (int64_t at = first; at + kTile <= last + 1; at += kTile) tile(from, choices, to, at);
  // The last tile overlaps the one before it: computing some columns twice is cheaper than one at a time.
  if ((last - first + 1) % kTile != 0) tile(from, choices, to, last + 1 - kTile);
}

double best_sum(const double* left, const double* right_last, int64_t size) {
  return chosen().sum(left, right_last, size);
}

const char* max_plus_instructions() { return chosen().name; }

}  // namespace unicron::planner
