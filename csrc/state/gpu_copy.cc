#include "state/gpu_copy.h"

#include <algorithm>
#include <array>
#include <string>

#include "base/error.h"
#include "gpu/kernels.h"

namespace unicron::state {

using gpu::check;
using gpu::DevicePointer;
using gpu::driver;

namespace {

constexpr size_t kUnitBytes = 16;
constexpr size_t kChunkBytes = 64 << 20;  // long enough to hide a launch, short enough for a short last digest
constexpr gpu::Result kPeerEnabledAlready = 704;

}  // namespace

// Streams, events and the digest's word of one device.
struct GpuCopier::Work {
  explicit Work(int on) : device(on), total(1, copies.get()) {}

  void add_digest(gpu::Stream stream, DevicePointer data, size_t num_bytes, size_t offset) {
    DevicePointer total_address = total.address();
    uint64_t first_word = offset / sizeof(uint64_t);
    void* arguments[] = {&data, &num_bytes, &first_word, &total_address};
    gpu::launch(device, "unicron_digest", num_bytes / kUnitBytes, stream, arguments);
  }

  void copy_fused(DevicePointer to, DevicePointer from, size_t num_bytes) {
    DevicePointer total_address = total.address();
    uint64_t first_word = 0;
    void* arguments[] = {&from, &to, &num_bytes, &first_word, &total_address};
    gpu::launch(device, "unicron_copy_digest", num_bytes / kUnitBytes, copies.get(), arguments);
  }

  void copy_overlapped(DevicePointer to, DevicePointer from, size_t num_bytes) {
    size_t chunk = 0;
    for (size_t at = 0; at < num_bytes; at += kChunkBytes, ++chunk) {
      const size_t nbytes = std::min(kChunkBytes, num_bytes - at);
      check(driver().copy(to + at, from + at, nbytes, copies.get()), "copying between GPUs");
      gpu::OwnedEvent& arrived_now = arrived[chunk % arrived.size()];
      arrived_now.record(copies.get());
      check(driver().wait_event(digests.get(), arrived_now.get(), 0), "ordering a digest after its copy");
      add_digest(digests.get(), to + at, nbytes, at);
    }
    summed.record(digests.get());
    check(driver().wait_event(copies.get(), summed.get(), 0), "ordering the end after the digests");
  }

  int device;
  gpu::OwnedStream copies;
  gpu::OwnedStream digests;
  // An event may be recorded again while a stream still waits for its earlier record: the wait keeps what it saw.
  std::array<gpu::OwnedEvent, 2> arrived;
  gpu::OwnedEvent summed;
  gpu::OwnedEvent begun;
  gpu::OwnedEvent ended;
  gpu::DeviceWords total;
};

GpuCopier::GpuCopier(int device) : device_(device) {
  const gpu::ScopedDevice current(device);
  gpu::load_kernels(device);
  work_ = std::make_unique<Work>(device);
}

GpuCopier::~GpuCopier() {
  if (is_stuck_) {
    static_cast<void>(work_.release());  // freeing its memory would wait for the copy
    return;
  }
  try {
    const gpu::ScopedDevice current(device_);
    work_.reset();
  } catch (const Error&) {
    static_cast<void>(work_.release());  // the device failed: what it holds goes with the process
  }
}

CopyResult GpuCopier::copy(DevicePointer to, DevicePointer from, size_t num_bytes, CopyMode mode, Deadline deadline) {
  if ((to | from) % kUnitBytes != 0 || (mode == CopyMode::kFused && num_bytes % kUnitBytes != 0)) {
    throw Error(ErrorCode::kInvalidArgument, "addresses, and for the fused copy the size too, are multiples of 16");
  }
  if (is_stuck_) throw Error(ErrorCode::kInvalidArgument, "an earlier copy of this object did not end in time");
  const gpu::ScopedDevice current(device_);
  Work& work = *work_;
  const gpu::Stream stream = work.copies.get();
  check(driver().set_bytes(work.total.address(), 0, sizeof(uint64_t), stream), "zeroing a digest");
  work.begun.record(stream);
  if (mode == CopyMode::kPlain) check(driver().copy(to, from, num_bytes, stream), "copying between GPUs");
  if (mode == CopyMode::kFused) work.copy_fused(to, from, num_bytes);
  if (mode == CopyMode::kOverlapped) {
    // The digests' stream must not add before the word is zero.
    check(driver().wait_event(work.digests.get(), work.begun.get(), 0), "ordering the digests after the start");
    work.copy_overlapped(to, from, num_bytes);
  }
  work.ended.record(stream);
  is_stuck_ = true;
  work.ended.wait(deadline, "copying " + std::to_string(num_bytes) + " bytes");
  is_stuck_ = false;
  CopyResult result;
  float elapsed_ms = 0;
  check(driver().elapsed_ms(&elapsed_ms, work.begun.get(), work.ended.get()), "reading the time of a copy");
  result.gpu_ms = static_cast<double>(elapsed_ms);
  if (mode != CopyMode::kPlain) result.digest = work.total.read(stream);
  return result;
}

void GpuCopier::enable_peer(int peer) {
  int is_possible = 0;
  check(driver().can_access_peer(&is_possible, device_, peer), "asking whether GPUs reach each other");
  if (is_possible == 0) {
    throw Error(ErrorCode::kNoDevice,
                "GPU " + std::to_string(device_) + " cannot reach the memory of GPU " + std::to_string(peer));
  }
  gpu::Context context = nullptr;
  check(driver().retain_context(&context, peer), "taking the context of GPU " + std::to_string(peer));
  const gpu::ScopedDevice current(device_);
  const gpu::Result result = driver().enable_peer(context, 0);
  if (result != kPeerEnabledAlready) check(result, "letting GPUs reach each other");
}

}  // namespace unicron::state
