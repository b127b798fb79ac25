#include "monitor/terminate.h"

#include <cxxabi.h>
#include <execinfo.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <typeinfo>

namespace unicron::monitor {

namespace {

PulsePagePtr* page_of_process = nullptr;  // never freed: terminate may come after static destruction
std::terminate_handler handler_before = nullptr;

void describe(char* text, size_t num_bytes) {
  const std::type_info* type = abi::__cxa_current_exception_type();
  if (type == nullptr) {
    std::snprintf(text, num_bytes, "std::terminate was called without an exception");
    return;
  }
  int status = 0;
  char* readable = abi::__cxa_demangle(type->name(), nullptr, nullptr, &status);
  const char* name = status == 0 && readable != nullptr ? readable : type->name();
  try {
    std::rethrow_exception(std::current_exception());
  } catch (const std::exception& error) {
    std::snprintf(text, num_bytes, "terminate called after throwing an instance of '%s': %s", name, error.what());
  } catch (...) {
    std::snprintf(text, num_bytes, "terminate called after throwing an instance of '%s'", name);
  }
}

// Where it came from: std::terminate is mostly called for a thread or a destructor that no Python stack shows.
void print_native_stack() {
  constexpr int kFramesMax = 64;
  void* frames[kFramesMax];
  ::backtrace_symbols_fd(frames, ::backtrace(frames, kFramesMax), STDERR_FILENO);
}

[[noreturn]] void on_terminate() {
  char text[kLastWordsBytes] = "";
  describe(text, sizeof(text));
  if (page_of_process != nullptr) (*page_of_process)->say_last_words(text);
  print_native_stack();
  if (handler_before != nullptr) handler_before();
  std::abort();
}

}  // namespace

void leave_last_words_in(const PulsePagePtr& page) {
  page_of_process = new PulsePagePtr(page);
  const std::terminate_handler present = std::get_terminate();
  if (present == on_terminate) return;
  handler_before = present;
  std::set_terminate(on_terminate);
}

}  // namespace unicron::monitor
