// A 64-bit digest of a buffer, against transfers and memory that went wrong (not against malice).
//
// XXH64 with seed 0, written from its public specification: about memory speed, and any XXH64 elsewhere checks it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unicron::state {

uint64_t checksum(const void* data, size_t num_bytes);

}  // namespace unicron::state
