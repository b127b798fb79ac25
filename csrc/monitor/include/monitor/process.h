// Facts about processes that only /proc tells.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace unicron::monitor {

// True when every thread of `pid` has PF_EXITING, or the process is gone: nothing of it can write to shared memory any
// more. Milliseconds after a SIGKILL, where the exit status may take a second (MECHANICS 1.7).
bool owner_gone(pid_t pid);
bool wait_owner_gone(pid_t pid, int64_t timeout_ms);

// State letter of /proc/PID/stat ('R', 'S', 'D', 'T' stopped, 't' traced, 'Z' ...), "" when the process is gone.
std::string process_state(pid_t pid);

struct Activity {
  int64_t ran_ns;      // all threads together, in steps of a clock tick
  int64_t starved_ns;  // the main thread was runnable, and another had the processor
};

// What the scheduler says of a process since it began; nothing when it is gone or the kernel does not count.
std::optional<Activity> process_activity(pid_t pid);

}  // namespace unicron::monitor
