// Inside a worker: the connection to its agent, and the end of collectives that would hang.
//
// Two native threads. The holder (holder.h) owns the robust mutex. The control thread reads the agent's frames: on an
// epoch plan it announces the epoch, shuts the sockets of the groups that the plan makes useless, then queues the
// message. In that order: a thread that wakes with a socket error finds the reason, a group registered meanwhile is
// shut, and who registers one later sees the epoch. When the connection ends the process ends at once: a worker must
// not train on unseen by its keeper. Neither thread ever calls Python.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/descriptor.h"
#include "base/ids.h"
#include "base/thread.h"
#include "monitor/frames.h"
#include "monitor/group_table.h"
#include "monitor/nccl_table.h"
#include "monitor/pulse.h"

namespace unicron::monitor {

constexpr int kExitConnectionEnded = 75;  // EX_TEMPFAIL: not the script's fault, start me again
constexpr size_t kQueuedFramesMax = 1024;
constexpr size_t kQueuedBytesMax = 64 << 20;

class WorkerMonitor {
 public:
  // `control_fd`, a connected stream socket, belongs to this object from here on, unless this throws.
  WorkerMonitor(int control_fd, const PulsePagePtr& pulse);
  WorkerMonitor(const WorkerMonitor&) = delete;
  WorkerMonitor& operator=(const WorkerMonitor&) = delete;
  ~WorkerMonitor();

  // In a forked child: see Thread::is_foreign(). Then this object must not even be destroyed.
  bool is_foreign() const { return thread_.is_foreign(); }
  GroupTable& groups() { return groups_; }
  // Communicators that a plan's arrival ends, too. Takes the place of an earlier table (of a role that is given up).
  void attach_nccl(std::shared_ptr<NcclTable> table);
  // What a plan's arrival does; number of sockets and communicators.
  int64_t shut(const std::vector<Rank>& touched);
  Epoch newest_epoch() const { return Epoch(newest_epoch_.load(std::memory_order_acquire)); }
  std::optional<std::string> next_frame(int64_t timeout_ms);
  void send(std::string_view message, int64_t timeout_ms);
  // Ends the control thread and the connection; the mutex stays held and the beat goes on until the process ends.
  void close();

 private:
  void watch_control();
  bool receive();
  void handle(Frame&& frame);
  void flush(Deadline deadline);

  GroupTable groups_;
  std::mutex nccl_mutex_;
  std::shared_ptr<NcclTable> nccl_;
  std::atomic<int64_t> newest_epoch_{0};

  std::mutex queue_mutex_;
  std::condition_variable queue_changed_;
  std::deque<std::string> queue_;
  size_t queued_bytes_ = 0;
  bool is_closed_ = false;

  std::timed_mutex send_mutex_;
  std::string unsent_;  // the rest of a frame that was begun

  FrameParser parser_;  // control thread only
  Descriptor control_;
  Descriptor stop_event_;
  Thread thread_;  // last: it uses all of the above
};

}  // namespace unicron::monitor
