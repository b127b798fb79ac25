// The three futex calls this project makes, on words that processes share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/time.h"

namespace unicron::monitor {

struct FutexWord {
  uint32_t* address;
  uint32_t expected;  // the wait ends at once when the word no longer has this value
};

constexpr size_t kFutexWordsMax = 128;  // the kernel's FUTEX_WAITV_MAX

// False on kernels before 5.16, under a seccomp filter that refuses it, and when UNICRON_NO_FUTEX_WAITV=1.
bool has_futex_waitv();

enum class FutexWake { kChanged, kTimedOut };

// Waits until one of the words changes or is woken, or until `deadline`. At most kFutexWordsMax words; needs
// has_futex_waitv() when there is more than one.
FutexWake futex_wait(const FutexWord* words, size_t num_words, Deadline deadline, bool use_waitv);

void futex_wake_all(uint32_t* word);

}  // namespace unicron::monitor
