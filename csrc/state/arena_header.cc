#include "state/arena_header.h"

#include <algorithm>
#include <cstring>

#include "base/descriptor.h"
#include "base/error.h"
#include "state/checksum.h"

namespace unicron::state {

namespace {

constexpr uint64_t kMagic = 0x616e65726163696e;  // "nicarena" as it lies in memory

size_t checked_file_bytes(int fd) {
  const size_t nbytes = file_bytes(fd);
  if (nbytes < kArenaHeaderBytes) {
    throw Error(ErrorCode::kArenaRefused, "descriptor " + std::to_string(fd) + " holds " + std::to_string(nbytes) +
                                              " bytes, less than an arena's header; is it one of create_arena()?");
  }
  return nbytes;
}

void require_size(const char* what, size_t nbytes, size_t nbytes_max) {
  if (nbytes <= nbytes_max) return;
  throw Error(ErrorCode::kLimitExceeded,
              std::string(what) + " has " + std::to_string(nbytes) + " bytes, limit " + std::to_string(nbytes_max));
}

}  // namespace

ArenaHeader::ArenaHeader(int fd)
    : file_bytes_(checked_file_bytes(fd)),
      mapping_(fd, 0, kArenaHeaderBytes),
      page_(mapping_.data(), kArenaHeaderBytes) {}

void ArenaHeader::open_step_on_stream(int64_t value, int device, gpu::Stream stream) {
  page_.write_on_stream(&fields().open_step, static_cast<uint64_t>(value), device, stream);
}

void ArenaHeader::format(std::string_view layout_digest, uint64_t nbytes) {
  require_size("layout_digest", layout_digest.size(), kLayoutDigestBytesMax);
  if (nbytes > file_bytes_ - kArenaHeaderBytes) {
    throw Error(ErrorCode::kArenaRefused, "the arena has room for " + std::to_string(file_bytes_ - kArenaHeaderBytes) +
                                              " bytes of content, " + std::to_string(nbytes) + " are wanted");
  }
  ArenaFields& header = fields();
  header.magic.store(0);  // not an arena while it changes
  std::memset(static_cast<void*>(&header), 0, kArenaHeaderBytes);
  header.version.store(kArenaVersion);
  header.nbytes.store(nbytes);
  std::memcpy(header.layout_digest, layout_digest.data(), layout_digest.size());
  header.layout_digest_bytes.store(layout_digest.size());
  header.magic.store(kMagic);
}

std::string ArenaHeader::check(std::string_view layout_digest, uint64_t nbytes) const {
  const ArenaFields& header = fields();
  if (header.magic.load() != kMagic) return "magic: this is not a formatted arena";
  if (header.version.load() != kArenaVersion) {
    return "version: the arena has " + std::to_string(header.version.load()) + ", this unicron writes " +
           std::to_string(kArenaVersion);
  }
  if (this->layout_digest() != layout_digest) {
    return "other layout: the arena's digest is " + this->layout_digest() + ", this model's is " +
           std::string(layout_digest);
  }
  if (header.nbytes.load() != nbytes) {
    return "other size: the arena holds " + std::to_string(header.nbytes.load()) + " bytes, this model's state is " +
           std::to_string(nbytes);
  }
  if (nbytes > file_bytes_ - kArenaHeaderBytes) {
    return "other size: the arena's file ends after " + std::to_string(file_bytes_ - kArenaHeaderBytes) +
           " bytes of content, " + std::to_string(nbytes) + " are stated";
  }
  return "";
}

std::string ArenaHeader::layout_digest() const {
  const ArenaFields& header = fields();
  return std::string(header.layout_digest, std::min<size_t>(header.layout_digest_bytes.load(), kLayoutDigestBytesMax));
}

void ArenaHeader::set_done(std::string_view bitmap) {
  require_size("the bitmap of micro-batches", bitmap.size(), kDoneBytesMax);
  ArenaFields& header = fields();
  // Bytes first, then the length: a reader never takes bytes that are not there yet. All words are written, because
  // those above the new length would come back with a later, longer one.
  for (size_t i = 0; i < kDoneBytesMax / sizeof(uint64_t); ++i) {
    uint64_t word = 0;
    const size_t at = i * sizeof(word);
    if (at < bitmap.size()) std::memcpy(&word, bitmap.data() + at, std::min(sizeof(word), bitmap.size() - at));
    if (header.done[i].load(std::memory_order_relaxed) != word) header.done[i].store(word, std::memory_order_release);
  }
  header.done_bytes.store(bitmap.size(), std::memory_order_release);
}

std::string ArenaHeader::done() const {
  const ArenaFields& header = fields();
  const size_t nbytes = std::min<size_t>(header.done_bytes.load(std::memory_order_acquire), kDoneBytesMax);
  std::string bitmap(nbytes, '\0');
  for (size_t at = 0; at < nbytes; at += sizeof(uint64_t)) {
    const uint64_t word = header.done[at / sizeof(uint64_t)].load(std::memory_order_acquire);
    std::memcpy(bitmap.data() + at, &word, std::min(sizeof(word), nbytes - at));
  }
  return bitmap;
}

void ArenaHeader::set_extra(std::string_view data) {
  require_size("extra", data.size(), kExtraBytesMax);
  ArenaFields& header = fields();
  std::memcpy(header.extra, data.data(), data.size());
  header.extra_bytes.store(data.size(), std::memory_order_release);
  header.extra_checksum.store(data.empty() ? 0 : checksum(data.data(), data.size()), std::memory_order_release);
}

std::string ArenaHeader::extra() const {
  const ArenaFields& header = fields();
  const size_t nbytes = std::min<size_t>(header.extra_bytes.load(std::memory_order_acquire), kExtraBytesMax);
  std::string data(header.extra, nbytes);
  const uint64_t expected = data.empty() ? 0 : checksum(data.data(), data.size());
  if (header.extra_checksum.load(std::memory_order_acquire) != expected) {
    throw Error(ErrorCode::kArenaRefused,
                "extra: its checksum is wrong, the writer died while writing it; take the state from a replica");
  }
  return data;
}

}  // namespace unicron::state
