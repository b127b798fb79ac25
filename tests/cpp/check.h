// The whole test framework: CHECK(condition) reports and counts, a test's main() returns the count.
#pragma once

#include <cstdio>

namespace unicron::testing {

inline int num_failures = 0;

inline void check(bool is_true, const char* condition, const char* file, int line) {
  if (is_true) return;
  ++num_failures;
  std::printf("%s:%d: not true: %s\n", file, line, condition);
}

// True when `call` throws an exception of type E.
template <class E, class Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const E&) {
    return true;
  }
  return false;
}

}  // namespace unicron::testing

#define CHECK(condition) unicron::testing::check(static_cast<bool>(condition), #condition, __FILE__, __LINE__)
