#include "state/digest.h"

#include <cstring>
#include <string>

#include "base/error.h"
#include "gpu/arithmetic.h"
#include "gpu/driver.h"
#include "gpu/kernels.h"

namespace unicron::state {

namespace {

constexpr uint64_t kUnitBytes = 16;

void require_aligned(uint64_t value, const char* what) {
  if (value % kUnitBytes == 0) return;
  throw Error(ErrorCode::kInvalidArgument,
              std::string(what) + " " + std::to_string(value) + " is not a multiple of 16");
}

}  // namespace

uint64_t digest(const void* data, size_t num_bytes, uint64_t offset) {
  require_aligned(offset, "the offset");
  const auto* bytes = static_cast<const unsigned char*>(data);
  const uint64_t first_word = offset / sizeof(uint64_t);
  const size_t num_words = num_bytes / sizeof(uint64_t);
  uint64_t total = 0;
  for (size_t i = 0; i < num_words; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i * sizeof(word), sizeof(word));
    total += gpu::mixed_word(word, first_word + i);
  }
  if (const size_t rest = num_bytes % sizeof(uint64_t); rest > 0) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + num_words * sizeof(word), rest);
    total += gpu::mixed_word(word, first_word + num_words);
  }
  return total;
}

uint64_t gpu_digest(int device, const std::vector<GpuPiece>& pieces, Deadline deadline) {
  for (const GpuPiece& piece : pieces) {
    require_aligned(piece.offset, "the offset");
    require_aligned(piece.address, "the address");
  }
  const gpu::ScopedDevice current(device);
  const gpu::OwnedStream stream;
  const gpu::DeviceWords total(1, stream.get());
  gpu::DevicePointer total_address = total.address();
  for (GpuPiece piece : pieces) {
    uint64_t first_word = piece.offset / sizeof(uint64_t);
    void* arguments[] = {&piece.address, &piece.num_bytes, &first_word, &total_address};
    gpu::launch(device, "unicron_digest", piece.num_bytes / kUnitBytes, stream.get(), arguments);
  }
  gpu::OwnedEvent done;
  done.record(stream.get());
  done.wait(deadline, "computing a digest");
  return total.read(stream.get());
}

}  // namespace unicron::state
