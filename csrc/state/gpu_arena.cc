#include "state/gpu_arena.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace unicron::state {

using gpu::check;
using gpu::DevicePointer;
using gpu::driver;

namespace {

// A whole number of granules on every GPU so far; rounded up all the same. Slabs are whole blocks, because the driver
// maps memory as a whole or not at all.
constexpr uint64_t kSharedBlockBytes = 64 << 20;
constexpr uint64_t kCapacityPerMemory = 4;
constexpr uint64_t kPieceUnitBytes = 512;  // torch aligns what it cuts from a piece to this

gpu::MemoryProperties properties(int device) {
  gpu::MemoryProperties wanted;
  wanted.location.id = device;
  wanted.is_rdma_capable = gpu::device_attribute(device, gpu::kAttributeRdmaCapable) != 0 ? 1 : 0;
  return wanted;
}

uint64_t granularity_of(int device) {
  if (gpu::device_attribute(device, gpu::kAttributeVirtualMemory) == 0 ||
      gpu::device_attribute(device, gpu::kAttributeFileDescriptors) == 0) {
    throw Error(ErrorCode::kNoDevice, "GPU " + std::to_string(device) +
                                          " cannot export memory as a file descriptor; state cannot outlive a process");
  }
  size_t granularity = 0;
  const gpu::MemoryProperties wanted = properties(device);
  check(driver().granularity(&granularity, &wanted, 0), "asking for the granularity of memory");
  return granularity;
}

uint64_t round_up(uint64_t nbytes, uint64_t unit) { return (nbytes + unit - 1) / unit * unit; }

void allow_access(DevicePointer address, uint64_t nbytes, int device) {
  gpu::MemoryAccess access;
  access.location.id = device;
  check(driver().set_access(address, nbytes, &access, 1), "allowing access to " + std::to_string(nbytes) + " bytes");
}

std::string named(const Piece& slab) {
  return "slab " + std::to_string(slab.number) + " (" + std::to_string(slab.nbytes) + " bytes)";
}

}  // namespace

GpuMemory GpuMemory::create(int device, uint64_t nbytes) {
  gpu::MemoryProperties wanted = properties(device);
  gpu::MemoryHandle handle = 0;
  gpu::Result result = driver().create_memory(&handle, nbytes, &wanted, 0);
  if (result != gpu::kSuccess && result != gpu::kOutOfMemory && wanted.is_rdma_capable != 0) {
    wanted.is_rdma_capable = 0;  // the GPU can, this machine cannot
    result = driver().create_memory(&handle, nbytes, &wanted, 0);
  }
  check(result, "making " + std::to_string(nbytes) + " bytes of exportable memory on GPU " + std::to_string(device));
  return GpuMemory(handle);
}

GpuMemory GpuMemory::import(int fd) {
  gpu::MemoryHandle handle = 0;
  // The interface takes the descriptor's number in the place of a pointer.
  void* number = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  check(driver().import_memory(&handle, number, gpu::kHandleFileDescriptor),
        "importing GPU memory of descriptor " + std::to_string(fd));
  return GpuMemory(handle);
}

GpuMemory::GpuMemory(GpuMemory&& other) noexcept
    : handle_(other.handle_), is_held_(std::exchange(other.is_held_, false)) {}

GpuMemory& GpuMemory::operator=(GpuMemory&& other) noexcept {
  std::swap(handle_, other.handle_);
  std::swap(is_held_, other.is_held_);
  return *this;
}

GpuMemory::~GpuMemory() {
  if (is_held_) driver().release_memory(handle_);
}

Descriptor GpuMemory::export_descriptor() const {
  int fd = -1;
  check(driver().export_memory(&fd, handle_, gpu::kHandleFileDescriptor, 0), "exporting GPU memory");
  return Descriptor(fd);
}

AddressRange::AddressRange(int device, uint64_t nbytes) : device_(device), nbytes_(nbytes) {
  const gpu::ScopedDevice current(device);
  check(driver().reserve_address(&begin_, nbytes, 0, 0, 0),
        "reserving " + std::to_string(nbytes) + " bytes of addresses");
}

AddressRange::~AddressRange() { driver().free_address(begin_, nbytes_); }

GpuArena::GpuArena(int device, uint64_t capacity_bytes, Backing backing)
    : device_(device),
      granularity_(granularity_of(device)),
      range_(device,
             round_up(capacity_bytes > 0 ? capacity_bytes : kCapacityPerMemory * gpu::device_memory_bytes(device),
                      granularity_)),
      backing_(backing) {
  if (backing_ == Backing::kOwn) return;
  const gpu::ScopedDevice current(device_);
  shared_block_ = GpuMemory::create(device_, round_up(kSharedBlockBytes, granularity_));
}

GpuArena::~GpuArena() {
  try {
    const gpu::ScopedDevice current(device_);
    for (Slab& slab : slabs_) unmap(&slab);
  } catch (const Error&) {
    // The device failed: its memory goes with the process.
  }
}

bool GpuArena::contains(DevicePointer address) const {
  return address >= range_.begin() && address - range_.begin() < range_.nbytes();
}

DevicePointer GpuArena::allocate(uint64_t nbytes) {
  const gpu::ScopedDevice current(device_);
  const std::lock_guard lock(mutex_);
  const uint64_t wanted = round_up(std::max<uint64_t>(nbytes, 1), kPieceUnitBytes);
  if (allocations_.size() >= kPiecesMax || wanted < nbytes) {
    throw Error(ErrorCode::kLimitExceeded, "the arena has " + std::to_string(allocations_.size()) + " pieces, " +
                                               std::to_string(nbytes) + " bytes more cannot be had");
  }
  Slab& slab = slab_for(wanted);
  Allocation made;
  made.piece = {static_cast<int64_t>(allocations_.size()), slab.place.offset + slab.used_bytes, wanted};
  made.slab = static_cast<size_t>(slab.place.number);
  made.is_live = true;
  by_offset_[made.piece.offset] = allocations_.size();
  allocations_.push_back(made);
  slab.used_bytes += wanted;
  ++slab.num_live;
  return range_.begin() + made.piece.offset;
}

// The one whose free end fits the piece best, else a new one: an eighth of all until now, so that what stays free at
// the ends is little of a large state and of a small one.
GpuArena::Slab& GpuArena::slab_for(uint64_t nbytes) {
  Slab* best = nullptr;
  for (Slab& slab : slabs_) {
    if (!slab.is_mapped || slab.free_bytes() < nbytes) continue;
    if (best == nullptr || slab.free_bytes() < best->free_bytes()) best = &slab;
  }
  if (best != nullptr) return *best;
  const uint64_t usual_bytes = std::clamp(used_bytes_ / 8, kSlabBytes, kLargeSlabBytes);
  const uint64_t slab_bytes = round_up(std::max(nbytes, usual_bytes), round_up(kSharedBlockBytes, granularity_));
  if (slab_bytes > range_.nbytes() - used_bytes_) {
    throw Error(ErrorCode::kLimitExceeded, "the arena's addresses are used up: " + std::to_string(used_bytes_) +
                                               " bytes given out, " + std::to_string(nbytes) + " more wanted");
  }
  Slab slab;
  slab.place = {static_cast<int64_t>(slabs_.size()), used_bytes_, slab_bytes};
  back(&slab);
  used_bytes_ += slab_bytes;
  slabs_.push_back(std::move(slab));
  return slabs_.back();
}

// Leaves nothing mapped when it throws.
void GpuArena::back(Slab* slab) {
  if (backing_ == Backing::kShared) return map(slab, shared_block_, round_up(kSharedBlockBytes, granularity_));
  GpuMemory memory = GpuMemory::create(device_, slab->place.nbytes);
  map(slab, memory, slab->place.nbytes);
  slab->memory = std::move(memory);
}

// The block is mapped as often as it takes to fill the slab.
void GpuArena::map(Slab* slab, const GpuMemory& memory, uint64_t block_bytes) {
  const DevicePointer begin = range_.begin() + slab->place.offset;
  const uint64_t slab_bytes = slab->place.nbytes;
  uint64_t mapped = 0;
  try {
    while (mapped < slab_bytes) {
      const uint64_t nbytes = std::min(block_bytes, slab_bytes - mapped);
      check(driver().map_memory(begin + mapped, nbytes, 0, memory.handle(), 0), "mapping " + named(slab->place));
      mapped += nbytes;
    }
    allow_access(begin, slab_bytes, device_);
  } catch (const Error&) {
    for (uint64_t at = 0; at < mapped; at += block_bytes) {
      driver().unmap_memory(begin + at, std::min(block_bytes, slab_bytes - at));
    }
    throw;
  }
  slab->is_mapped = true;
}

// Mapping by mapping: the driver takes no part of one, and promises nothing for several at once.
void GpuArena::unmap(Slab* slab) {
  if (!slab->is_mapped) return;
  slab->is_mapped = false;
  const DevicePointer begin = range_.begin() + slab->place.offset;
  const uint64_t slab_bytes = slab->place.nbytes;
  const uint64_t block_bytes = slab->memory.is_held() ? slab_bytes : round_up(kSharedBlockBytes, granularity_);
  for (uint64_t at = 0; at < slab_bytes; at += block_bytes) {
    check(driver().unmap_memory(begin + at, std::min(block_bytes, slab_bytes - at)), "unmapping " + named(slab->place));
  }
}

void GpuArena::free(DevicePointer address) {
  const gpu::ScopedDevice current(device_);
  const std::lock_guard lock(mutex_);
  const uint64_t offset = address - range_.begin();
  const auto found = by_offset_.find(offset);
  if (found == by_offset_.end()) {
    throw Error(ErrorCode::kInvalidArgument, "no piece of the arena begins at this address");
  }
  Allocation& allocation = allocations_[found->second];
  by_offset_.erase(found);
  allocation.is_live = false;
  Slab& slab = slabs_[allocation.slab];
  if (--slab.num_live > 0) return;
  unmap(&slab);
  slab.memory = GpuMemory();
}

std::vector<Piece> GpuArena::pieces() const {
  const std::lock_guard lock(mutex_);
  std::vector<Piece> live;
  for (const Allocation& allocation : allocations_) {
    if (allocation.is_live) live.push_back(allocation.piece);
  }
  return live;
}

std::vector<Piece> GpuArena::slabs() const {
  const std::lock_guard lock(mutex_);
  std::vector<Piece> live;
  for (const Slab& slab : slabs_) {
    if (slab.num_live > 0) live.push_back(slab.place);
  }
  return live;
}

uint64_t GpuArena::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t nbytes = shared_block_.is_held() ? round_up(kSharedBlockBytes, granularity_) : 0;
  for (const Slab& slab : slabs_) nbytes += slab.memory.is_held() ? slab.place.nbytes : 0;
  return nbytes;
}

std::vector<Descriptor> GpuArena::export_all() const {
  const gpu::ScopedDevice current(device_);
  const std::lock_guard lock(mutex_);
  std::vector<Descriptor> descriptors;
  for (const Slab& slab : slabs_) {
    if (slab.num_live == 0) continue;
    if (!slab.memory.is_held()) {
      throw Error(ErrorCode::kInvalidArgument, "an arena without memory of its own has nothing to export");
    }
    descriptors.push_back(slab.memory.export_descriptor());
  }
  return descriptors;
}

void GpuArena::adopt(const std::vector<int>& fds, const std::vector<uint64_t>& sizes) {
  const std::vector<Piece> live = slabs();
  if (fds.size() != live.size() || sizes.size() != live.size()) {
    throw Error(ErrorCode::kArenaRefused, "the arena has " + std::to_string(live.size()) + " slabs, " +
                                              std::to_string(fds.size()) + " descriptors and " +
                                              std::to_string(sizes.size()) + " sizes were given; another script's");
  }
  for (size_t i = 0; i < live.size(); ++i) {
    if (sizes[i] == live[i].nbytes) continue;
    throw Error(ErrorCode::kArenaRefused,
                named(live[i]) + " was of " + std::to_string(sizes[i]) + " bytes: it is another layout's arena");
  }
  const gpu::ScopedDevice current(device_);
  std::vector<GpuMemory> imported;
  for (const int fd : fds) imported.push_back(GpuMemory::import(fd));  // all, before anything is changed
  check(driver().synchronize(), "waiting for GPU " + std::to_string(device_) + " before its memory is exchanged");
  const std::lock_guard lock(mutex_);
  size_t next = 0;
  for (Slab& slab : slabs_) {
    if (slab.num_live == 0) continue;
    unmap(&slab);
    slab.memory = std::move(imported[next++]);
    map(&slab, slab.memory, slab.place.nbytes);
  }
  shared_block_ = GpuMemory();
  backing_ = Backing::kOwn;
}

void GpuArena::let_go() {
  const gpu::ScopedDevice current(device_);
  check(driver().synchronize(), "waiting for GPU " + std::to_string(device_) + " before its memory is let go");
  const std::lock_guard lock(mutex_);
  if (backing_ == Backing::kOwn) return;
  for (Slab& slab : slabs_) unmap(&slab);
}

void GpuArena::take_own_memory() {
  const gpu::ScopedDevice current(device_);
  check(driver().synchronize(), "waiting for GPU " + std::to_string(device_) + " before its memory is exchanged");
  const std::lock_guard lock(mutex_);
  if (backing_ == Backing::kOwn) return;
  backing_ = Backing::kOwn;
  for (Slab& slab : slabs_) {
    if (slab.num_live == 0) continue;
    unmap(&slab);
    back(&slab);
  }
  shared_block_ = GpuMemory();
}

GpuMapping::GpuMapping(int fd, uint64_t nbytes, int device)
    : device_(device), range_(device, round_up(nbytes, granularity_of(device))) {
  const gpu::ScopedDevice current(device_);
  const GpuMemory memory = GpuMemory::import(fd);  // the mapping keeps it
  check(driver().map_memory(range_.begin(), range_.nbytes(), 0, memory.handle(), 0),
        "mapping " + std::to_string(nbytes) + " bytes of another process");
  try {
    allow_access(range_.begin(), range_.nbytes(), device_);
  } catch (const Error&) {
    driver().unmap_memory(range_.begin(), range_.nbytes());
    throw;
  }
}

GpuMapping::~GpuMapping() { driver().unmap_memory(range_.begin(), range_.nbytes()); }

}  // namespace unicron::state
