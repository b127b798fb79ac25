// Training state on a GPU in memory that outlives its process.
//
// An arena is one reserved range of addresses of one GPU, filled from its start with slabs of exportable memory (256
// MiB to 1 GiB, or as large as one allocation takes). Allocations ("pieces") take the next addresses of the slab whose
// end they fit best, and are recorded in order: the same script allocates the same pieces in the same order, so an
// heir's slab number k is its predecessor's number k, whatever the addresses of either are. Adoption replaces the
// memory under every slab by the predecessor's: no copy, no pointer of the heir changes. Slabs, because each costs a
// descriptor and a mapping: with one per allocation of torch's a model has hundreds, and adoption takes as many times
// longer.
//
// Backing::kShared is an understudy's: all slabs show one small block of memory again and again, so a model of any size
// can be built on a busy GPU (what it writes there is nonsense and is never read); it gets memory of its own, or its
// predecessor's, when it gets a role.
//
// Rejected: one allocation for everything (then the state has to be moved into it, and twice its memory be there while
// it is), and CUDA IPC handles (their memory dies with its process).
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/descriptor.h"
#include "gpu/driver.h"

namespace unicron::state {

constexpr size_t kPiecesMax = 65'536;
// Few enough that the descriptors of the largest GPU's arena and its own fit one message (250).
constexpr uint64_t kSlabBytes = 256 << 20;
constexpr uint64_t kLargeSlabBytes = 1 << 30;

// Memory of a GPU with a handle. Released when destroyed; mappings of it keep it alive.
class GpuMemory {
 public:
  GpuMemory() = default;
  static GpuMemory create(int device, uint64_t nbytes);
  static GpuMemory import(int fd);  // the descriptor stays the caller's
  GpuMemory(GpuMemory&& other) noexcept;
  GpuMemory& operator=(GpuMemory&& other) noexcept;
  ~GpuMemory();

  bool is_held() const { return is_held_; }
  gpu::MemoryHandle handle() const { return handle_; }
  Descriptor export_descriptor() const;

 private:
  explicit GpuMemory(gpu::MemoryHandle handle) : handle_(handle), is_held_(true) {}
  gpu::MemoryHandle handle_ = 0;
  bool is_held_ = false;
};

// A reserved range of addresses. Unmaps nothing by itself.
class AddressRange {
 public:
  AddressRange(int device, uint64_t nbytes);
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  ~AddressRange();
  gpu::DevicePointer begin() const { return begin_; }
  uint64_t nbytes() const { return nbytes_; }

 private:
  int device_;
  gpu::DevicePointer begin_ = 0;
  uint64_t nbytes_;
};

enum class Backing { kOwn, kShared };

struct Piece {
  int64_t number = 0;   // in order, freed ones counted
  uint64_t offset = 0;  // from the arena's first address
  uint64_t nbytes = 0;
};

class GpuArena {
 public:
  // `capacity_bytes` of addresses, not of memory; 0: four times the GPU's memory, because freed addresses are not used
  // again.
  GpuArena(int device, uint64_t capacity_bytes, Backing backing);
  GpuArena(const GpuArena&) = delete;
  GpuArena& operator=(const GpuArena&) = delete;
  ~GpuArena();

  int device() const { return device_; }
  gpu::DevicePointer begin() const { return range_.begin(); }
  bool contains(gpu::DevicePointer address) const;
  // Throws Error, also when the GPU's memory is used up.
  gpu::DevicePointer allocate(uint64_t nbytes);
  // A slab without pieces is given back. Throws kInvalidArgument for an address where no piece begins.
  void free(gpu::DevicePointer address);
  std::vector<Piece> pieces() const;  // live ones, in order
  std::vector<Piece> slabs() const;   // those with live pieces, in order
  uint64_t memory_bytes() const;      // held by this arena

  // One descriptor per slab, in order. Throws kInvalidArgument for shared backing.
  std::vector<Descriptor> export_all() const;
  // Replaces the memory under all slabs by what the descriptors hold. They stay the caller's. The owner's context must
  // be gone: its kernels may still write. Waits for this device first. On an error the arena is unusable.
  void adopt(const std::vector<int>& fds, const std::vector<uint64_t>& sizes);
  // Shared backing is taken from under the slabs, which takes longer than to adopt: to be done while a predecessor
  // ends. Nothing may be read or written until one of the other two. Nothing to do for an arena with memory of its own.
  void let_go();
  // Shared backing becomes memory of its own; the content is undefined. Nothing to do for an arena that has it.
  void take_own_memory();

 private:
  struct Slab {
    Piece place;
    uint64_t used_bytes = 0;
    int64_t num_live = 0;
    GpuMemory memory;  // not held: shared backing
    bool is_mapped = false;
    uint64_t free_bytes() const { return place.nbytes - used_bytes; }
  };
  struct Allocation {
    Piece piece;
    size_t slab = 0;
    bool is_live = false;
  };

  Slab& slab_for(uint64_t nbytes);
  void back(Slab* slab);
  void map(Slab* slab, const GpuMemory& memory, uint64_t block_bytes);
  void unmap(Slab* slab);

  const int device_;
  const uint64_t granularity_;
  mutable std::mutex mutex_;
  AddressRange range_;
  Backing backing_;
  GpuMemory shared_block_;
  uint64_t used_bytes_ = 0;  // addresses taken by slabs
  std::vector<Slab> slabs_;
  std::vector<Allocation> allocations_;   // in the order in which they were made
  std::map<uint64_t, size_t> by_offset_;  // of the live ones, places in it
};

// Another process's memory, mapped here: to read a peer's piece, or to look at an arena whose owner is gone.
class GpuMapping {
 public:
  // `device` reads it; the memory may lie on a peer.
  GpuMapping(int fd, uint64_t nbytes, int device);
  GpuMapping(const GpuMapping&) = delete;
  GpuMapping& operator=(const GpuMapping&) = delete;
  ~GpuMapping();
  gpu::DevicePointer address() const { return range_.begin(); }
  uint64_t nbytes() const { return range_.nbytes(); }

 private:
  int device_;
  AddressRange range_;
};

}  // namespace unicron::state
