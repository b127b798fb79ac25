// Arenas, their header and the checksum, without Python.
#include <sys/mman.h>

#include <cstring>
#include <string>

#include "base/error.h"
#include "check.h"
#include "state/arena.h"
#include "state/arena_header.h"
#include "state/checksum.h"

namespace unicron::state {
namespace {

void test_checksum_vectors() {
  CHECK(checksum("", 0) == 0xEF46DB3751D8E999);
  CHECK(checksum("abc", 3) == 0x44BC2CF5AD770999);
  std::string text(1000, 'x');
  const uint64_t before = checksum(text.data(), text.size());
  text[777] = 'y';
  CHECK(checksum(text.data(), text.size()) != before);
}

void test_arena_is_mapped_over_a_region() {
  const size_t nbytes = 4 * kPageBytes;
  const Descriptor arena = create_arena(nbytes - kArenaHeaderBytes);
  void* region = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const auto address = reinterpret_cast<uintptr_t>(region);
  map_fixed(address, arena.get(), nbytes);
  std::strcpy(static_cast<char*>(region) + kArenaHeaderBytes, "content");
  const SharedMapping other(arena.get(), kArenaHeaderBytes, kPageBytes);
  CHECK(std::string(static_cast<char*>(other.data())) == "content");
  CHECK(testing::throws<Error>([&] { map_fixed(address + 1, arena.get(), kPageBytes); }));
  CHECK(testing::throws<Error>([&] { map_fixed(address, arena.get(), nbytes + kPageBytes); }));
  ::munmap(region, nbytes);
}

void test_header() {
  const Descriptor arena = create_arena(100);
  ArenaHeader header(arena.get());
  CHECK(!header.check("d", 100).empty());
  header.format("d", 100);
  CHECK(header.check("d", 100).empty());
  header.set_done(std::string("\x05\x80", 2));
  CHECK(header.done() == std::string("\x05\x80", 2));
  header.set_extra("abc");
  CHECK(header.extra() == "abc");
  header.fields().extra[1] = 'X';
  CHECK(testing::throws<Error>([&] { header.extra(); }));
}

}  // namespace
}  // namespace unicron::state

int main() {
  unicron::state::test_checksum_vectors();
  unicron::state::test_arena_is_mapped_over_a_region();
  unicron::state::test_header();
  return unicron::testing::num_failures;
}
