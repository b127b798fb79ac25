// The digest of state content, the same on a CPU and on a GPU: a sum of mixed words (gpu/arithmetic.h).
//
// Unlike checksum.h's it can be computed in any order, by thousands of threads, while the bytes are copied, and the
// digests of pieces add up. XXH64 cannot: each of its steps needs the one before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/time.h"
#include "gpu/driver_api.h"

namespace unicron::state {

// Of `num_bytes` that begin at byte `offset` (a multiple of 16) of the whole. The last word is filled up with zeros.
// Sums modulo 2^64 of neighbours are the digest of both.
uint64_t digest(const void* data, size_t num_bytes, uint64_t offset);

// Memory of a GPU at byte `offset` of a whole; `address` is a multiple of 16 too.
struct GpuPiece {
  gpu::DevicePointer address;
  size_t num_bytes;
  uint64_t offset;
};

// The sum of the digests of these pieces, with one wait for all: a model has a thousand, and a wait takes as long as
// the digest of 100 MB. No longer than the deadline.
uint64_t gpu_digest(int device, const std::vector<GpuPiece>& pieces, Deadline deadline);

}  // namespace unicron::state
