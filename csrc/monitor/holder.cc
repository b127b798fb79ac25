#include "monitor/holder.h"

#include <errno.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "base/time.h"
#include "monitor/futex.h"

namespace unicron::monitor {

namespace {

constexpr int64_t kBeatIntervalNs = 250'000'000;  // 4 Hz: twenty processes of a node wake a core 80 times a second

int acquire(pthread_mutex_t* mutex) {
  const int result = pthread_mutex_trylock(mutex);
  if (result != EOWNERDEAD) return result;
  // The last owner died and the agent did not reset the page: it is ours all the same.
  return pthread_mutex_consistent(mutex);
}

void beat_for_ever(PulseFields& fields) {
  const timespec interval = to_timespec(MonotonicTime{kBeatIntervalNs});
  while (true) {
    fields.beat_ns.store(monotonic_now().ns, std::memory_order_relaxed);
    ::nanosleep(&interval, nullptr);
  }
}

// The result of acquiring goes to `acquired`; after that only the page is touched, which stays mapped.
void hold(const PulsePagePtr& page, std::promise<int>* acquired) {
  PulseFields& fields = page->fields();
  const int result = acquire(&fields.mutex);
  if (result != 0) {
    acquired->set_value(result);
    return;
  }
  fields.beat_ns.store(monotonic_now().ns, std::memory_order_relaxed);
  fields.owner_tid.store(static_cast<int32_t>(::syscall(SYS_gettid)), std::memory_order_relaxed);
  fields.owner_pid.store(::getpid(), std::memory_order_release);
  futex_wake_all(page->mutex_word());  // a supervisor that waits for an owner looks again
  acquired->set_value(0);
  beat_for_ever(fields);
}

}  // namespace

void hold_for_life(const PulsePagePtr& page) {
  // The thread owns the promise through a shared_ptr: set_value() may still touch it after get() has returned.
  const auto acquired = std::make_shared<std::promise<int>>();
  std::future<int> result = acquired->get_future();
  Thread thread("unicron-hold", [page, acquired] { hold(page, acquired.get()); });
  thread.detach();
  const int error = result.get();
  if (error == 0) return;
  if (error != EBUSY) throw system_error("cannot take the robust mutex of a pulse page", error);
  const int32_t owner = page->fields().owner_pid.load(std::memory_order_acquire);
  if (owner == ::getpid()) return;  // an earlier monitor of this process took it
  throw Error(ErrorCode::kSlotHeld, "slot " + std::to_string(page->slot().value()) + " is held by process " +
                                        std::to_string(owner) + "; every worker needs a slot of its own");
}

}  // namespace unicron::monitor
