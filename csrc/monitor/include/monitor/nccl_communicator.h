// A communicator that unicron makes itself: by the whole list of members, or by difference from one that exists.
//
// All of NCCL's calls are made non-blocking and waited for with a bound, so a member that does not come holds nobody.
// What a version of NCCL cannot do (shrink from 2.27, revoke from 2.28, grow from 2.29) is refused by name.
//
// NCCL fills in the handle of a split, shrunk or grown communicator from a thread of its own, while the old one says
// "in progress": the word it writes to lies in a cell that stays where it is.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/time.h"
#include "gpu/nccl_api.h"

namespace unicron::monitor {

// Ends the group calls that this thread has open: see training/nccl_groups.py for who leaves them so.
void close_group_calls();
std::string make_nccl_id();  // 128 bytes, for the members of one communicator

class NcclCommunicator {
 public:
  // Begins to connect; wait_ready() ends it.
  NcclCommunicator(int device, int num_ranks, int rank, std::string_view unique_id);
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;
  ~NcclCommunicator();  // aborts what is still owned, in the background

  gpu::NcclComm handle() const;  // null until it is ready
  int device() const { return device_; }
  int num_ranks() const;
  int rank() const;
  // Throws kTimeout, or kDevice with NCCL's reason.
  void wait_ready(Deadline deadline) const;

  // In the order of `stream`, in place. `type` is ncclDataType_t.
  void all_reduce(gpu::DevicePointer data, size_t count, int type, gpu::Stream stream) const;

  // By difference: collective over the members that stay. Each new one is waited for with wait_ready() before anything
  // else is done with this one, which must live until then.
  std::unique_ptr<NcclCommunicator> split(int color, int key) const;
  // Without these ranks. `abort`: first end what is under way on this one (some of whose members may be dead).
  std::unique_ptr<NcclCommunicator> shrink(const std::vector<int>& excluded, bool abort) const;
  std::string make_grow_id() const;  // one existing member, for all
  // Of the existing members the one that made the id gives it, the others give none; a new one starts with join().
  std::unique_ptr<NcclCommunicator> grow(int num_ranks, std::string_view grow_id) const;
  static std::unique_ptr<NcclCommunicator> join(int device, int num_ranks, int rank, std::string_view grow_id);

  // The caller (NcclTable) ends it from here on.
  gpu::NcclComm release();
  void abort();  // waits for NCCL

 private:
  struct Cell {
    gpu::NcclComm handle = nullptr;
  };

  NcclCommunicator(int device, gpu::NcclComm parent)
      : device_(device), parent_(parent), cell_(std::make_unique<Cell>()) {}

  const int device_;
  const gpu::NcclComm parent_ = nullptr;  // says how far this one is, until it has a handle
  std::unique_ptr<Cell> cell_;
};

}  // namespace unicron::monitor
