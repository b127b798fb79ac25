#include "base/thread.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cassert>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace unicron {

Thread::Thread(const char* name, std::function<void()> body) : pid_(::getpid()) {
  assert(std::strlen(name) <= 15);
  // The mask is inherited, so it is set around the start: no signal can slip into the thread's first instructions.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::string failure;
  try {
    thread_ = std::make_unique<std::thread>(std::move(body));
    pthread_setname_np(thread_->native_handle(), name);
  } catch (const std::system_error& error) {
    failure = error.what();
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (!failure.empty()) {
    throw Error(ErrorCode::kSystem, std::string("cannot start thread ") + name + ": " + failure +
                                        "; raise the limit of processes (ulimit -u)");
  }
}

Thread::~Thread() {
  // A std::thread that is neither joined nor detached ends the process when destroyed; in a forked child it can be
  // neither, so its few bytes are left.
  if (thread_ != nullptr && is_foreign()) static_cast<void>(thread_.release());
}

bool Thread::is_foreign() const { return thread_ != nullptr && pid_ != ::getpid(); }

void Thread::join() {
  assert(!is_foreign());
  if (thread_ == nullptr) return;
  thread_->join();
  thread_.reset();
}

void Thread::detach() {
  assert(!is_foreign());
  if (thread_ == nullptr) return;
  thread_->detach();
  thread_.reset();
}

}  // namespace unicron
