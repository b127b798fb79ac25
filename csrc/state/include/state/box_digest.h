// The digest of a box of a global tensor: the sum over its elements, modulo 2^64, of a hash of (place in the tensor,
// bits). Boxes that do not overlap add up in any order, so it does not depend on how a tensor is cut and who holds
// what.
//
// digest.h's hashes 8 bytes at their place in a buffer: it cannot follow an element that lies elsewhere afterwards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unicron::state {

struct BoxLayout {
  int64_t first_byte = 0;        // of the box's first element in the buffer
  int64_t item_bytes = 0;        // 1, 2, 4 or 8
  std::vector<int64_t> extent;   // elements along each axis
  std::vector<int64_t> strides;  // in the buffer, in elements
  std::vector<int64_t> offset;   // of the box in the tensor
  std::vector<int64_t> shape;    // of the tensor
};

// Throws Error(kInvalidArgument) when the numbers do not belong together, or when the box reaches out of the buffer.
uint64_t box_digest(const void* data, size_t num_bytes, const BoxLayout& box);

}  // namespace unicron::state
