// Codes, time, descriptors, mappings and threads of csrc/base.
#include <errno.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

#include "base/descriptor.h"
#include "base/error.h"
#include "base/ids.h"
#include "base/mapping.h"
#include "base/thread.h"
#include "base/time.h"
#include "check.h"

namespace unicron {
namespace {

void test_deadline() {
  const MonotonicTime now{1'000'000'000};
  const Deadline deadline = Deadline::after_ms(now, 10);
  CHECK(!deadline.is_past(now));
  CHECK(deadline.remaining_ms(now) == 10);
  CHECK(deadline.remaining_ms(MonotonicTime{now.ns + 9'000'001}) == 1);  // rounded up
  CHECK(deadline.is_past(MonotonicTime{now.ns + 10'000'000}));
  CHECK(deadline.remaining_ms(MonotonicTime{now.ns + 20'000'000}) == 0);
  CHECK(Deadline::after_ms(now, -5).is_past(now));
  CHECK(Deadline::after_ms(now, INT64_MAX).remaining_ms(now) > 0);  // no overflow
  CHECK(to_timespec(MonotonicTime{2'000'000'003}).tv_sec == 2);
  CHECK(to_timespec(MonotonicTime{2'000'000'003}).tv_nsec == 3);
}

void test_clock_does_not_go_back() {
  const MonotonicTime first = monotonic_now();
  CHECK(monotonic_now().ns >= first.ns);
}

void test_ids() {
  CHECK(SlotId(3) == SlotId(3));
  CHECK(SlotId(3) != SlotId(4));
  CHECK(Rank(1) < Rank(2));
  static_assert(!std::is_convertible_v<Rank, SlotId>);
  static_assert(!std::is_convertible_v<int, Rank>);
}

void test_descriptor_moves() {
  Descriptor event = create_event();
  const int fd = event.get();
  Descriptor moved = std::move(event);
  CHECK(!event.is_open());
  CHECK(moved.get() == fd);
  CHECK(file_bytes(fd) == 0);
  moved.reset();
  CHECK(testing::throws<Error>([&] { file_bytes(fd); }));
}

void test_memory_file() {
  const Descriptor file = create_memory_file("test", kPageBytes);
  CHECK(file_bytes(file.get()) == kPageBytes);
  const SharedMapping first(file.get(), 0, kPageBytes);
  const SharedMapping second(file.get(), 0, kPageBytes);
  std::strcpy(static_cast<char*>(first.data()), "shared");
  CHECK(std::string(static_cast<char*>(second.data())) == "shared");
}

void test_thread() {
  bool has_run = false;
  Thread thread("unicron-test", [&] { has_run = true; });
  CHECK(thread.is_running());
  CHECK(!thread.is_foreign());
  thread.join();
  CHECK(has_run);
  CHECK(!thread.is_running());
}

void test_error() {
  const Error error = system_error("cannot open x", ENOENT);
  CHECK(error.code() == ErrorCode::kSystem);
  CHECK(std::string(error.what()) == "cannot open x: No such file or directory");
}

}  // namespace
}  // namespace unicron

int main() {
  unicron::test_deadline();
  unicron::test_clock_does_not_go_back();
  unicron::test_ids();
  unicron::test_descriptor_moves();
  unicron::test_memory_file();
  unicron::test_thread();
  unicron::test_error();
  return unicron::testing::num_failures;
}
