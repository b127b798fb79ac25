// Which NCCL communicators belong to which process group, so that a plan's arrival can end the collectives that would
// hang: what group_table.h does for gloo's sockets.
//
// NCCL does not report a dead peer, and one abort after another takes half a second each. So a plan's
// arrival ends all affected communicators at once, one native thread each: the hung stream is free in milliseconds, the
// rest of the teardown goes on in the background. Whose communicator it is decides how:
//   torch's   is revoked: its kernels stop, its memory stays torch's, whose group is destroyed later
//   unicron's is aborted, which frees it
// An ending that takes longer than its bound is reported as stuck; its thread is left behind. Nothing else touches a
// communicator that is being ended, and forget() returns only when no thread does.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/thread.h"
#include "base/time.h"
#include "gpu/nccl_api.h"

namespace unicron::monitor {

constexpr size_t kCommunicatorsMax = 4096;
constexpr int64_t kEndingMsMax = 10'000;

enum class NcclState : int {
  kWhole = 0,
  kError = 1,  // NCCL's own asynchronous error; see NcclTable::error()
  kEnding = 2,
  kEnded = 3,
  kStuck = 4,      // the ending is not done after kEndingMsMax
  kForgotten = 5,  // not registered
};

struct Communicator {
  gpu::NcclComm handle = nullptr;
  int device = 0;
  std::vector<Rank> ranks;
  bool is_cross = false;  // spans replicas: ended at every new epoch
  bool is_owned = false;  // made by unicron: aborted instead of revoked
};

class NcclTable {
 public:
  NcclTable();
  NcclTable(const NcclTable&) = delete;
  NcclTable& operator=(const NcclTable&) = delete;
  // Leaves threads behind that are stuck in NCCL.
  ~NcclTable();

  bool is_foreign() const { return poller_.is_foreign(); }
  void add(GroupId group, Communicator communicator);
  // Waits until no thread uses the communicator; false when one still does at the deadline (then it stays registered).
  bool forget(GroupId group, Deadline deadline);
  NcclState state(GroupId group) const;
  std::string error(GroupId group) const;  // of kError, and why an ending failed
  // Ends the communicators that span replicas and those that hold a touched rank; number of endings begun. Returns at
  // once. A version without ncclCommRevoke leaves torch's to torch, and state() says kError with the reason.
  int64_t end(const std::vector<Rank>& touched);
  int64_t end_all();
  // True when every ending is done.
  bool wait_ended(Deadline deadline);
  // Milliseconds from the begin of the latest end() to each group's end, for measurements.
  std::vector<std::pair<GroupId, double>> ending_ms() const;

 private:
  struct Entry {
    Communicator communicator;
    NcclState state = NcclState::kWhole;
    std::string error;
    bool is_in_use = false;  // by the poller or an ending thread
    MonotonicTime end_begun;
    MonotonicTime end_done;
  };
  // Shared with the threads that end communicators: one that is stuck may outlive the table.
  struct Shared {
    mutable std::mutex mutex;
    std::condition_variable changed;
    std::map<GroupId, std::shared_ptr<Entry>> entries;
    bool is_stopping = false;
  };

  static void poll_for_ever(const std::shared_ptr<Shared>& shared);
  static void poll_one(Shared& shared, const std::shared_ptr<Entry>& entry);
  static void end_one(Shared& shared, Entry& entry);
  template <class Selects>
  int64_t end_selected(const Selects& selects);

  const std::shared_ptr<Shared> shared_;
  Thread poller_;
};

}  // namespace unicron::monitor
