// A native thread of this project: named, and deaf to signals (those belong to Python's main thread).
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <thread>

namespace unicron {

class Thread {
 public:
  Thread() = default;
  // `name` has at most 15 characters (the kernel's limit). Throws Error when no thread can be started.
  Thread(const char* name, std::function<void()> body);
  Thread(Thread&&) = default;
  Thread& operator=(Thread&&) = default;
  ~Thread();  // the thread was joined, detached, or belongs to the parent of this forked process

  // True in a process forked from the one that started it: there the thread does not exist, whatever it locked stays
  // locked, and whoever owns this object must leave it alone.
  bool is_foreign() const;
  bool is_running() const { return thread_ != nullptr; }
  void join();
  void detach();

 private:
  std::unique_ptr<std::thread> thread_;
  pid_t pid_ = 0;
};

}  // namespace unicron
