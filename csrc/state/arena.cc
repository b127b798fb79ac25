#include "state/arena.h"

#include <errno.h>
#include <sys/mman.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "base/error.h"
#include "base/mapping.h"

namespace unicron::state {

namespace {

constexpr uint64_t kArenaBytesMax = uint64_t{1} << 46;  // 64 TiB: keeps sums below from overflowing

uint64_t round_up_to_page(uint64_t nbytes) { return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

std::string hexadecimal(uintptr_t address) {
  char text[2 + 16 + 1];
  std::snprintf(text, sizeof(text), "0x%" PRIxPTR, address);
  return text;
}

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kArenaRefused, why); }

// One mapping, not several neighbours: else MAP_FIXED would silently replace memory that belongs to somebody else.
bool lies_in_one_mapping(uintptr_t address, uint64_t nbytes) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  while (std::getline(maps, line)) {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    if (std::sscanf(line.c_str(), "%" SCNxPTR "-%" SCNxPTR, &begin, &end) != 2) continue;
    if (address >= begin && address < end) return end - address >= nbytes;
  }
  return false;
}

}  // namespace

Descriptor create_arena(uint64_t nbytes) {
  if (nbytes == 0 || nbytes > kArenaBytesMax) {
    throw Error(ErrorCode::kInvalidArgument,
                "an arena of " + std::to_string(nbytes) + " bytes cannot be made; give 1 to 2^46");
  }
  return create_memory_file("unicron-arena", kArenaHeaderBytes + round_up_to_page(nbytes));
}

void map_fixed(uintptr_t address, int fd, uint64_t nbytes) {
  if (address == 0 || address % kPageBytes != 0) {
    refuse("address " + hexadecimal(address) + " is not a multiple of " + std::to_string(kPageBytes) +
           "; place the state in a page-aligned region");
  }
  if (nbytes == 0 || nbytes > kArenaBytesMax) refuse("cannot map " + std::to_string(nbytes) + " bytes");
  const uint64_t available = file_bytes(fd);
  if (available < nbytes) {
    refuse("descriptor " + std::to_string(fd) + " holds " + std::to_string(available) + " bytes, " +
           std::to_string(nbytes) + " are to be mapped; it is another layout's arena");
  }
  if (!lies_in_one_mapping(address, round_up_to_page(nbytes))) {
    refuse("the " + std::to_string(nbytes) + " bytes at " + hexadecimal(address) +
           " are not one mapping of this process; map the region in one piece first");
  }
  void* wanted = reinterpret_cast<void*>(address);
  if (::mmap(wanted, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    refuse(system_error("cannot map descriptor " + std::to_string(fd) + " at " + hexadecimal(address), errno).what());
  }
}

}  // namespace unicron::state
