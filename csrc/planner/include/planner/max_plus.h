// The inner loop of the dynamic program: to[j] = max over choices c of from[j - counts[c]] + keys[c].
//
// Written for vector registers: a tile of columns stays in registers while all choices pass by. The instructions are
// chosen at run time (AVX-512, AVX2, or what every machine of this architecture has), so one build fits all.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unicron::planner {

// Doubles before from[0] that must be readable and hold kNever: a tile looks that far below column 0.
constexpr size_t kColumnsPad = 32;

struct Choices {
  const int32_t* counts;  // ascending
  const double* keys;
  size_t size;
};

// Fills to[first ... last], both included; from[-kColumnsPad ... last] must be readable.
void max_plus(const double* from, const Choices& choices, double* to, int64_t first, int64_t last);

// One column of the same, where both sides are sums: max over i < size of left[i] + right_last[-i]; kNever for size 0.
double best_sum(const double* left, const double* right_last, int64_t size);

// The instructions in use: "avx512f", "avx2" or "generic".
const char* max_plus_instructions();

}  // namespace unicron::planner
