// Memory that holds a worker's training state and outlives the worker.
//
// A memfd: the agent keeps the descriptor open, so the content stays when the worker is killed. An heir builds the same
// model over scratch memory and then adopts the dead worker's content by one mmap(MAP_FIXED) over that region: no copy,
// and every tensor that views the region follows. It costs the unmapping of the scratch pages that were touched
// (bench/bench_arena.py). Rejected: one shared memory
// object per tensor, which needs hundreds of descriptors and /dev/shm.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/descriptor.h"

namespace unicron::state {

constexpr size_t kArenaHeaderBytes = 4096;  // the header page; content starts after it

// Header page and `nbytes` of content, rounded up to whole pages.
Descriptor create_arena(uint64_t nbytes);

// Maps the first `nbytes` of `fd` over the region that begins at `address`. Throws kArenaRefused, and changes nothing,
// when the file is smaller, the address is not page-aligned, or the region does not lie in one mapping of this process.
void map_fixed(uintptr_t address, int fd, uint64_t nbytes);

}  // namespace unicron::state
