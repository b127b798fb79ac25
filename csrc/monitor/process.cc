#include "monitor/process.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/time.h"

namespace unicron::monitor {

namespace {

constexpr uint32_t kFlagExiting = 0x4;  // PF_EXITING of the kernel's sched.h, printed in field 9 of stat
constexpr int64_t kWaitStepNsMin = 100'000;
constexpr int64_t kWaitStepNsMax = 2'000'000;

struct Stat {
  char state = '?';
  uint32_t flags = 0;
  unsigned long ticks = 0;  // of the processor, user and system
};

void require_pid(pid_t pid) {
  if (pid <= 0) {
    throw Error(ErrorCode::kInvalidArgument, "pid is " + std::to_string(pid) + "; give the id of one process (> 0)");
  }
}

// Reads a stat file. Nothing when the task is gone.
std::optional<Stat> read_stat(const std::string& path) {
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) {
    if (errno == ENOENT || errno == ESRCH) return std::nullopt;
    throw system_error("cannot open " + path, errno);
  }
  char text[512];
  const ssize_t got = ::read(file.get(), text, sizeof(text) - 1);
  if (got <= 0) return std::nullopt;  // ESRCH: it went away after the open
  text[got] = '\0';
  // The name is in parentheses and may itself contain ") ": the last one ends it.
  const char* after_name = std::strrchr(text, ')');
  Stat stat;
  unsigned long system_ticks = 0;
  if (after_name == nullptr || std::sscanf(after_name + 1, " %c %*d %*d %*d %*d %*d %u %*u %*u %*u %*u %lu %lu",
                                           &stat.state, &stat.flags, &stat.ticks, &system_ticks) != 4) {
    throw Error(ErrorCode::kSystem, "cannot read " + path + ": unknown format");
  }
  stat.ticks += system_ticks;
  return stat;
}

}  // namespace

bool owner_gone(pid_t pid) {
  require_pid(pid);
  const std::string tasks = "/proc/" + std::to_string(pid) + "/task";
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(tasks.c_str()), ::closedir);
  if (directory == nullptr) {
    if (errno == ENOENT || errno == ESRCH) return true;
    throw system_error("cannot list " + tasks, errno);
  }
  // A killed process cannot start a thread that this walk would miss: clone() fails under a pending SIGKILL, and a
  // living one is seen by its other threads.
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] == '.') continue;
    const std::optional<Stat> stat = read_stat(tasks + "/" + entry->d_name + "/stat");
    if (stat.has_value() && (stat->flags & kFlagExiting) == 0) return false;
  }
  return true;
}

bool wait_owner_gone(pid_t pid, int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(monotonic_now(), timeout_ms);
  int64_t step_ns = kWaitStepNsMin;
  while (!owner_gone(pid)) {
    const MonotonicTime now = monotonic_now();
    if (deadline.is_past(now)) return false;
    const timespec step = to_timespec(MonotonicTime{std::min(step_ns, deadline.at().ns - now.ns)});
    ::nanosleep(&step, nullptr);
    step_ns = std::min(step_ns * 2, kWaitStepNsMax);
  }
  return true;
}

std::string process_state(pid_t pid) {
  require_pid(pid);
  const std::optional<Stat> stat = read_stat("/proc/" + std::to_string(pid) + "/stat");
  return stat.has_value() ? std::string(1, stat->state) : std::string();
}

std::optional<Activity> process_activity(pid_t pid) {
  require_pid(pid);
  const std::optional<Stat> stat = read_stat("/proc/" + std::to_string(pid) + "/stat");
  if (!stat.has_value()) return std::nullopt;
  const std::string path = "/proc/" + std::to_string(pid) + "/schedstat";  // of the main thread
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file.is_open()) return std::nullopt;
  char text[128];
  const ssize_t got = ::read(file.get(), text, sizeof(text) - 1);
  if (got <= 0) return std::nullopt;
  text[got] = '\0';
  long long starved = 0;
  if (std::sscanf(text, "%*d %lld", &starved) != 1) return std::nullopt;
  const int64_t tick_ns = 1'000'000'000 / ::sysconf(_SC_CLK_TCK);
  return Activity{static_cast<int64_t>(stat->ticks) * tick_ns, starved};
}

}  // namespace unicron::monitor
