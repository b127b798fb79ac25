#include "monitor/nccl_communicator.h"

#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/thread.h"
#include "gpu/driver.h"
#include "gpu/nccl.h"

namespace unicron::monitor {

using gpu::check_nccl;
using gpu::nccl;

namespace {

constexpr int kGroupDepthMax = 4;  // torch's own nesting is 2

gpu::NcclUniqueId to_id(std::string_view bytes) {
  gpu::NcclUniqueId id{};
  if (bytes.size() != sizeof(id.internal)) {
    throw Error(ErrorCode::kInvalidArgument,
                "an NCCL id has 128 bytes, not " + std::to_string(bytes.size()) + "; use make_nccl_id()");
  }
  std::memcpy(id.internal, bytes.data(), sizeof(id.internal));
  return id;
}

std::string to_bytes(const gpu::NcclUniqueId& id) { return std::string(id.internal, sizeof(id.internal)); }

template <class Call>
Call require(Call function, const char* name) {
  if (function != nullptr) return function;
  throw Error(ErrorCode::kNoDevice, "NCCL " + std::to_string(gpu::nccl_version()) + " has no " + name);
}

void abort_handle(int device, gpu::NcclComm handle) {
  const gpu::ScopedDevice current(device);
  check_nccl(nccl().abort(handle), "aborting a communicator");
}

}  // namespace

std::string make_nccl_id() {
  gpu::NcclUniqueId id{};
  check_nccl(nccl().unique_id(&id), "making an NCCL id");
  return to_bytes(id);
}

// At depth 0 NCCL refuses the call and nothing happens, and what an operation that failed left queued is not launched.
void close_group_calls() {
  const gpu::NcclApi* api = gpu::find_nccl();
  if (api == nullptr) return;
  for (int depth = 0; depth < kGroupDepthMax; ++depth) static_cast<void>(api->group_end());
}

NcclCommunicator::NcclCommunicator(int device, int num_ranks, int rank, std::string_view unique_id)
    : NcclCommunicator(device, nullptr) {
  const gpu::ScopedDevice current(device);
  gpu::NcclConfig config;
  check_nccl(nccl().init(&cell_->handle, num_ranks, to_id(unique_id), rank, &config), "making a communicator");
}

NcclCommunicator::~NcclCommunicator() {
  if (cell_ == nullptr) return;
  const gpu::NcclComm handle = this->handle();
  if (handle == nullptr) {
    static_cast<void>(cell_.release());  // NCCL may still write to it
    return;
  }
  try {
    Thread aborter("unicron-abort", [device = device_, handle] {
      try {
        abort_handle(device, handle);
      } catch (const Error&) {
        // Nobody is left to tell; its memory goes with the process.
      }
    });
    aborter.detach();
  } catch (const Error&) {
    // No thread to be had: the communicator stays until the process ends.
  }
}

gpu::NcclComm NcclCommunicator::handle() const {
  return cell_ != nullptr ? __atomic_load_n(&cell_->handle, __ATOMIC_ACQUIRE) : nullptr;
}

int NcclCommunicator::num_ranks() const {
  int value = 0;
  check_nccl(nccl().count(handle(), &value), "asking a communicator for its size");
  return value;
}

int NcclCommunicator::rank() const {
  int value = 0;
  check_nccl(nccl().rank(handle(), &value), "asking a communicator for its rank");
  return value;
}

void NcclCommunicator::wait_ready(Deadline deadline) const {
  while (true) {
    const gpu::NcclComm own = handle();
    const gpu::NcclComm asked = own != nullptr ? own : parent_;
    gpu::NcclResult state = gpu::kNcclInProgress;
    if (asked != nullptr) check_nccl(nccl().async_error(asked, &state), "asking a communicator for its state");
    check_nccl(state, "connecting a communicator");
    if (own != nullptr && state == gpu::kNcclSuccess) return;
    if (deadline.is_past(monotonic_now())) {
      throw Error(ErrorCode::kTimeout, "the communicator is not ready: a member has not come");
    }
    const timespec step = to_timespec(MonotonicTime{100'000});
    ::nanosleep(&step, nullptr);
  }
}

void NcclCommunicator::all_reduce(gpu::DevicePointer data, size_t count, int type, gpu::Stream stream) const {
  const gpu::ScopedDevice current(device_);
  void* address = reinterpret_cast<void*>(static_cast<uintptr_t>(data));
  check_nccl(nccl().all_reduce(address, address, count, type, gpu::kNcclSum, handle(), stream), "an all-reduce");
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::split(int color, int key) const {
  const gpu::ScopedDevice current(device_);
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator(device_, handle()));
  gpu::NcclConfig config;
  check_nccl(nccl().split(handle(), color, key, &made->cell_->handle, &config), "splitting a communicator");
  return made;
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::shrink(const std::vector<int>& excluded, bool abort) const {
  const auto call = require(nccl().shrink, "ncclCommShrink");
  const gpu::ScopedDevice current(device_);
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator(device_, handle()));
  std::vector<int> ranks = excluded;  // NCCL takes them as not const
  gpu::NcclConfig config;
  const int flags = abort ? gpu::kNcclShrinkAbort : 0;
  const auto num_ranks = static_cast<int>(ranks.size());
  check_nccl(call(handle(), ranks.data(), num_ranks, &made->cell_->handle, &config, flags), "shrinking a communicator");
  return made;
}

std::string NcclCommunicator::make_grow_id() const {
  gpu::NcclUniqueId id{};
  check_nccl(require(nccl().grow_id, "ncclCommGetUniqueId")(handle(), &id), "making an id to grow a communicator");
  return to_bytes(id);
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::grow(int num_ranks, std::string_view grow_id) const {
  const auto call = require(nccl().grow, "ncclCommGrow");
  const gpu::ScopedDevice current(device_);
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator(device_, handle()));
  gpu::NcclConfig config;
  const gpu::NcclUniqueId id = grow_id.empty() ? gpu::NcclUniqueId{} : to_id(grow_id);
  const gpu::NcclUniqueId* given = grow_id.empty() ? nullptr : &id;
  check_nccl(call(handle(), num_ranks, given, -1, &made->cell_->handle, &config), "growing a communicator");
  return made;
}

std::unique_ptr<NcclCommunicator> NcclCommunicator::join(int device, int num_ranks, int rank,
                                                         std::string_view grow_id) {
  const auto call = require(nccl().grow, "ncclCommGrow");
  const gpu::ScopedDevice current(device);
  std::unique_ptr<NcclCommunicator> made(new NcclCommunicator(device, nullptr));
  gpu::NcclConfig config;
  const gpu::NcclUniqueId id = to_id(grow_id);
  check_nccl(call(nullptr, num_ranks, &id, rank, &made->cell_->handle, &config), "joining a communicator");
  return made;
}

gpu::NcclComm NcclCommunicator::release() { return cell_ != nullptr ? std::exchange(cell_->handle, nullptr) : nullptr; }

void NcclCommunicator::abort() {
  if (const gpu::NcclComm handle = release()) abort_handle(device_, handle);
}

}  // namespace unicron::monitor
