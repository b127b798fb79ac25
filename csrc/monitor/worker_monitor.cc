#include "monitor/worker_monitor.h"

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <exception>
#include <utility>

#include "base/error.h"
#include "base/time.h"
#include "monitor/fatal_signal.h"
#include "monitor/holder.h"
#include "monitor/terminate.h"

namespace unicron::monitor {

namespace {

constexpr size_t kReceiveBytes = 64 << 10;

void require_stream_socket(int control_fd) {
  int type = 0;
  socklen_t length = sizeof(type);
  if (::getsockopt(control_fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0 || type != SOCK_STREAM) {
    throw Error(ErrorCode::kInvalidArgument,
                "control_fd " + std::to_string(control_fd) + " is not a stream socket; connect to the agent first");
  }
}

[[noreturn]] void end_process(const std::string& why) {
  // write() and _exit(): nothing of Python or of the C library's exit runs, which might wait for a stuck thread.
  const std::string line = "unicron: " + why + "; this worker ends (exit code 75)\n";
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(kExitConnectionEnded);
}

}  // namespace

WorkerMonitor::WorkerMonitor(int control_fd, const PulsePagePtr& pulse) : stop_event_(create_event()) {
  require_stream_socket(control_fd);
  hold_for_life(pulse);
  leave_last_words_in(pulse);
  announce_in(pulse);
  control_.reset(control_fd);
  thread_ = Thread("unicron-control", [this] { watch_control(); });
}

WorkerMonitor::~WorkerMonitor() { close(); }

void WorkerMonitor::close() {
  {
    const std::lock_guard lock(queue_mutex_);
    is_closed_ = true;
  }
  queue_changed_.notify_all();
  signal_event(stop_event_.get());
  thread_.join();
  const std::lock_guard lock(send_mutex_);
  control_.reset();
}

void WorkerMonitor::attach_nccl(std::shared_ptr<NcclTable> table) {
  const std::lock_guard lock(nccl_mutex_);
  nccl_ = std::move(table);
}

int64_t WorkerMonitor::shut(const std::vector<Rank>& touched) {
  std::shared_ptr<NcclTable> nccl;
  {
    const std::lock_guard lock(nccl_mutex_);
    nccl = nccl_;
  }
  // Communicators first: raising their flags takes longer to show, and gloo's sockets are shut in microseconds.
  const int64_t num_ending = nccl != nullptr ? nccl->end(touched) : 0;
  return num_ending + groups_.shut(touched);
}

std::optional<std::string> WorkerMonitor::next_frame(int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(monotonic_now(), timeout_ms);
  const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline.at().ns));
  std::unique_lock lock(queue_mutex_);
  queue_changed_.wait_until(lock, until, [this] { return is_closed_ || !queue_.empty(); });
  if (queue_.empty()) {
    if (is_closed_) throw Error(ErrorCode::kConnectionEnded, "the monitor is closed; no more frames come");
    return std::nullopt;
  }
  std::string message = std::move(queue_.front());
  queue_.pop_front();
  queued_bytes_ -= message.size();
  return message;
}

void WorkerMonitor::send(std::string_view message, int64_t timeout_ms) {
  const std::string frame = encode_message(message);
  const Deadline deadline = Deadline::after_ms(monotonic_now(), timeout_ms);
  const auto until = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline.at().ns));
  const std::unique_lock lock(send_mutex_, until);
  if (!lock.owns_lock()) {
    throw Error(ErrorCode::kTimeout, "another thread has been sending to the agent for all of " +
                                         std::to_string(timeout_ms) + " ms; nothing of this message was sent");
  }
  if (!control_.is_open()) throw Error(ErrorCode::kConnectionEnded, "the monitor is closed; nothing can be sent");
  unsent_.append(frame);
  flush(deadline);
  if (unsent_.empty()) return;
  const bool was_begun = unsent_.size() < frame.size();
  if (!was_begun) unsent_.resize(unsent_.size() - frame.size());
  throw Error(ErrorCode::kTimeout,
              "the agent did not read for " + std::to_string(timeout_ms) + " ms; " +
                  (was_begun ? "the message was begun, its rest goes out before the next" : "nothing of it was sent"));
}

// Sends as much of `unsent_` as the deadline allows. Tries at least once.
void WorkerMonitor::flush(Deadline deadline) {
  size_t num_sent = 0;
  while (num_sent < unsent_.size()) {
    const ssize_t sent =
        ::send(control_.get(), unsent_.data() + num_sent, unsent_.size() - num_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent > 0) {
      num_sent += static_cast<size_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) {
      throw Error(ErrorCode::kConnectionEnded, system_error("cannot send to the agent", errno).what());
    }
    const MonotonicTime now = monotonic_now();
    if (deadline.is_past(now)) break;
    pollfd writable{control_.get(), POLLOUT, 0};
    ::poll(&writable, 1, deadline.remaining_ms(now));
  }
  unsent_.erase(0, num_sent);
}

void WorkerMonitor::watch_control() {
  while (true) {
    pollfd watched[2] = {{control_.get(), POLLIN, 0}, {stop_event_.get(), POLLIN, 0}};
    // Without a timeout: close() ends it through the event, the agent's end through the socket.
    if (::poll(watched, 2, -1) < 0 && errno != EINTR) end_process(system_error("cannot poll", errno).what());
    if (watched[1].revents != 0) return;
    if (watched[0].revents == 0) continue;
    try {
      while (receive()) {
      }
    } catch (const std::exception& error) {
      end_process(std::string("the agent's connection cannot be read: ") + error.what());
    }
  }
}

// Takes what has arrived. False when there is nothing more for now.
bool WorkerMonitor::receive() {
  char bytes[kReceiveBytes];
  const ssize_t got = ::recv(control_.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
  if (got == 0) end_process("the agent's connection ended");
  if (got < 0) {
    if (errno == EAGAIN || errno == EINTR) return false;
    end_process(system_error("the agent's connection failed", errno).what());
  }
  parser_.push(bytes, static_cast<size_t>(got));
  while (std::optional<Frame> frame = parser_.pop()) handle(std::move(*frame));
  return static_cast<size_t>(got) == sizeof(bytes);
}

void WorkerMonitor::handle(Frame&& frame) {
  // A plan that is not newer than the newest is passed on, but shuts nothing: those groups may have been rebuilt.
  if (frame.kind == kFrameKindPlan && newest_epoch() < frame.epoch) {
    // Announce first, shut afterwards: a group registered in between is shut, one registered later sees the epoch.
    newest_epoch_.store(frame.epoch.value(), std::memory_order_release);
    shut(frame.touched);
  }
  {
    const std::lock_guard lock(queue_mutex_);
    queued_bytes_ += frame.message.size();
    queue_.push_back(std::move(frame.message));
    if (queue_.size() > kQueuedFramesMax || queued_bytes_ > kQueuedBytesMax) {
      throw Error(ErrorCode::kLimitExceeded, "the training loop left " + std::to_string(queue_.size()) +
                                                 " frames unread, limit " + std::to_string(kQueuedFramesMax));
    }
  }
  queue_changed_.notify_all();
}

}  // namespace unicron::monitor
