// Operating errors: one table of codes, one exception type.
//
// A programmer's error is an assert. What the world does (a peer that left, a file too small, a wait that ended) is an
// Error with a code; the bindings turn the code into the Python class named in the table. Messages say what is wrong,
// where, and what to do, because they reach a user unchanged.
#pragma once

#include <stdexcept>
#include <string>

namespace unicron {

// X(code, Python class that carries it)
#define UNICRON_ERROR_CODES(X)      \
  X(kInvalidArgument, UnicronError) \
  X(kSystem, UnicronError)          \
  X(kConnectionEnded, UnicronError) \
  X(kLimitExceeded, UnicronError)   \
  X(kSlotHeld, UnicronError)        \
  X(kNoDevice, UnicronError)        \
  X(kDevice, UnicronError)          \
  X(kTimeout, Timeout)              \
  X(kArenaRefused, ArenaRefused)

enum class ErrorCode {
#define UNICRON_ENUMERATOR(code, python_class) code,
  UNICRON_ERROR_CODES(UNICRON_ENUMERATOR)
#undef UNICRON_ENUMERATOR
};

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

// Error of a failed system call: "<what>: <strerror(error_number)>".
Error system_error(const std::string& what, int error_number);

}  // namespace unicron
