#include "monitor/futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cassert>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"

namespace unicron::monitor {

namespace {

// futex_waitv(2) spelled out, so that it builds against kernel headers from before 5.16.
constexpr long kSysFutexWaitv = 449;
constexpr uint32_t kFutex32 = 2;  // FUTEX_32; without FUTEX_PRIVATE_FLAG: the words are shared between processes

struct WaitvEntry {
  uint64_t expected;
  uint64_t address;
  uint32_t flags;
  uint32_t reserved;
};

struct KernelTimespec {
  int64_t seconds;
  int64_t nanoseconds;
};

long wait_many(const FutexWord* words, size_t num_words, Deadline deadline) {
  WaitvEntry entries[kFutexWordsMax] = {};
  for (size_t i = 0; i < num_words; ++i) {
    entries[i].expected = words[i].expected;
    entries[i].address = reinterpret_cast<uintptr_t>(words[i].address);
    entries[i].flags = kFutex32;
  }
  const timespec at = to_timespec(deadline.at());
  const KernelTimespec timeout{at.tv_sec, at.tv_nsec};
  return ::syscall(kSysFutexWaitv, entries, num_words, 0, &timeout, CLOCK_MONOTONIC);
}

long wait_one(const FutexWord& word, Deadline deadline) {
  // FUTEX_WAIT_BITSET, because its timeout is a point on CLOCK_MONOTONIC as futex_waitv's is.
  const timespec at = to_timespec(deadline.at());
  return ::syscall(SYS_futex, word.address, FUTEX_WAIT_BITSET, word.expected, &at, nullptr, FUTEX_BITSET_MATCH_ANY);
}

}  // namespace

bool has_futex_waitv() {
  const char* refused = std::getenv("UNICRON_NO_FUTEX_WAITV");
  if (refused != nullptr && std::strcmp(refused, "1") == 0) return false;
  // Waiting on nothing is refused as invalid where the call exists.
  return ::syscall(kSysFutexWaitv, nullptr, 0, 0, nullptr, 0) < 0 && errno == EINVAL;
}

FutexWake futex_wait(const FutexWord* words, size_t num_words, Deadline deadline, bool use_waitv) {
  assert(num_words >= 1 && num_words <= (use_waitv ? kFutexWordsMax : 1));
  const long result = use_waitv ? wait_many(words, num_words, deadline) : wait_one(words[0], deadline);
  if (result >= 0 || errno == EAGAIN || errno == EINTR) return FutexWake::kChanged;
  if (errno == ETIMEDOUT) return FutexWake::kTimedOut;
  throw system_error("cannot wait on " + std::to_string(num_words) + " futex words", errno);
}

void futex_wake_all(uint32_t* word) { ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace unicron::monitor
