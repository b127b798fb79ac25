// Copies between GPUs of a node through mapped memory, with a digest of what arrived.
//
// kPlain is the copy engine alone. kOverlapped lets it copy chunk after chunk while a kernel on the destination's GPU
// reads what has arrived: the digest is of the destination's memory and costs the time of the last chunk. kFused is one
// kernel that reads, sums and writes: fewer bytes moved, but it needs multiprocessors to fill the link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "gpu/driver.h"

namespace unicron::state {

enum class CopyMode { kPlain, kOverlapped, kFused };

struct CopyResult {
  uint64_t digest = 0;  // 0 for kPlain
  double gpu_ms = 0;    // between two events around the whole copy
};

// Runs on `device`, whose memory is the destination. One copy at a time.
class GpuCopier {
 public:
  explicit GpuCopier(int device);
  GpuCopier(const GpuCopier&) = delete;
  GpuCopier& operator=(const GpuCopier&) = delete;
  ~GpuCopier();
  // Both addresses are multiples of 16 and can be reached from `device`. Waits no longer than the deadline; after a
  // timeout the copy is still under way and nothing else can be copied with this object.
  CopyResult copy(gpu::DevicePointer to, gpu::DevicePointer from, size_t num_bytes, CopyMode mode, Deadline deadline);
  // `device` may reach the ordinary allocations of `peer` (exported memory needs no such word).
  void enable_peer(int peer);

 private:
  struct Work;

  const int device_;
  bool is_stuck_ = false;
  std::unique_ptr<Work> work_;
};

}  // namespace unicron::state
