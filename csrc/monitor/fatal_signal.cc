#include "monitor/fatal_signal.h"

#include <signal.h>

#include <array>
#include <atomic>
#include <mutex>

#include "base/error.h"

namespace unicron::monitor {

namespace {

constexpr std::array<int, 5> kFatalSignals = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

std::array<struct sigaction, NSIG> handlers_before{};
std::atomic<PulsePage*> page_of_process{nullptr};
static_assert(std::atomic<PulsePage*>::is_always_lock_free);  // read in a signal handler

void do_as_before(int number, siginfo_t* info, void* context) {
  const struct sigaction& before = handlers_before[static_cast<size_t>(number)];
  if ((before.sa_flags & SA_SIGINFO) != 0) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    ::sigaction(number, &before, nullptr);
    ::raise(number);
  }
}

void on_fatal_signal(int number, siginfo_t* info, void* context) {
  const PulsePage* page = page_of_process.load(std::memory_order_acquire);
  if (page != nullptr) page->announce_death();
  do_as_before(number, info, context);
}

}  // namespace

void announce_fatal_signals() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction action{};
    action.sa_sigaction = on_fatal_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // as faulthandler has it: also of a stack that is full
    for (const int number : kFatalSignals) {
      auto& before = handlers_before[static_cast<size_t>(number)];
      if (::sigaction(number, nullptr, &before) != 0 || ::sigaction(number, &action, nullptr) != 0) {
        throw system_error("cannot handle signal " + std::to_string(number), errno);
      }
    }
  });
}

void announce_in(const PulsePagePtr& page) {
  // Never freed: a signal may come after static destruction, and in any thread.
  page_of_process.store((new PulsePagePtr(page))->get(), std::memory_order_release);
}

}  // namespace unicron::monitor
