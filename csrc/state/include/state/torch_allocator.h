// What torch.cuda.memory.CUDAPluggableAllocator calls: allocations of a torch.cuda.MemPool come from an open arena.
//
// Torch finds the two functions by name in this shared library, so no torch header is needed here, and calls them from
// any thread. They never throw: an allocation that fails is a null pointer, which torch reports as out of memory after
// it has tried to free its caches; last_allocator_error() says why.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "state/gpu_arena.h"

namespace unicron::state {

// Allocations on this arena's GPU come from it from now on; one arena a GPU. It stays referenced until replaced or
// closed, and after that as long as it holds a piece that torch may free.
void open_arena(const std::shared_ptr<GpuArena>& arena);
void close_arena(int device);
std::string last_allocator_error();

}  // namespace unicron::state

extern "C" {
__attribute__((visibility("default"))) void* unicron_arena_malloc(size_t nbytes, int device, void* stream);
__attribute__((visibility("default"))) void unicron_arena_free(void* address, size_t nbytes, int device, void* stream);
}
