#include "state/box_digest.h"

#include <cstring>
#include <string>

#include "base/error.h"

namespace unicron::state {

namespace {

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, "box_digest: " + why); }

// splitmix64's finalizer.
uint64_t finalized(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}

uint64_t hashed(uint64_t place, uint64_t bits) { return finalized(finalized(place + 0x9E3779B97F4A7C15ULL) ^ bits); }

template <class Word>
uint64_t row(const unsigned char* bytes, int64_t count, int64_t step_bytes, uint64_t place, uint64_t place_step) {
  uint64_t total = 0;
  for (int64_t i = 0; i < count; ++i) {
    Word word = 0;
    std::memcpy(&word, bytes + i * step_bytes, sizeof(word));
    total += hashed(place + static_cast<uint64_t>(i) * place_step, word);
  }
  return total;
}

// One walk over all axes but the last, whose elements are a row.
class Walk {
 public:
  Walk(const unsigned char* data, const BoxLayout& box) : data_(data), box_(box), place_steps_(box.shape.size(), 1) {
    for (size_t axis = box.shape.size(); axis-- > 1;) {
      place_steps_[axis - 1] = place_steps_[axis] * static_cast<uint64_t>(box.shape[axis]);
    }
  }

  uint64_t from(size_t axis, int64_t byte, uint64_t place) const {
    const int64_t step_bytes = box_.strides[axis] * box_.item_bytes;
    place += static_cast<uint64_t>(box_.offset[axis]) * place_steps_[axis];
    if (axis + 1 == box_.extent.size()) return of_row(byte, step_bytes, place, place_steps_[axis]);
    uint64_t total = 0;
    for (int64_t i = 0; i < box_.extent[axis]; ++i) {
      total += from(axis + 1, byte + i * step_bytes, place + static_cast<uint64_t>(i) * place_steps_[axis]);
    }
    return total;
  }

 private:
  uint64_t of_row(int64_t byte, int64_t step_bytes, uint64_t place, uint64_t place_step) const {
    const int64_t count = box_.extent.back();
    switch (box_.item_bytes) {
      case 1:
        return row<uint8_t>(data_ + byte, count, step_bytes, place, place_step);
      case 2:
        return row<uint16_t>(data_ + byte, count, step_bytes, place, place_step);
      case 4:
        return row<uint32_t>(data_ + byte, count, step_bytes, place, place_step);
      default:
        return row<uint64_t>(data_ + byte, count, step_bytes, place, place_step);
    }
  }

  const unsigned char* data_;
  const BoxLayout& box_;
  std::vector<uint64_t> place_steps_;  // of the tensor's axes, in elements
};

void require_sane(size_t num_bytes, const BoxLayout& box) {
  const size_t axes = box.extent.size();
  if (axes == 0 || box.strides.size() != axes || box.offset.size() != axes || box.shape.size() != axes) {
    refuse("extent, strides, offset and shape have different or no axes");
  }
  const int64_t item = box.item_bytes;
  if (item != 1 && item != 2 && item != 4 && item != 8) refuse("an item of " + std::to_string(item) + " bytes");
  int64_t last = box.first_byte;
  for (size_t axis = 0; axis < axes; ++axis) {
    if (box.extent[axis] < 1 || box.strides[axis] < 0 || box.offset[axis] < 0 ||
        box.offset[axis] > box.shape[axis] - box.extent[axis]) {
      refuse("axis " + std::to_string(axis) + " reaches out of the tensor");
    }
    int64_t reach = 0;
    if (__builtin_mul_overflow(box.extent[axis] - 1, box.strides[axis], &reach) ||
        __builtin_mul_overflow(reach, item, &reach) || __builtin_add_overflow(last, reach, &last)) {
      refuse("axis " + std::to_string(axis) + " is too long");
    }
  }
  const bool fits = box.first_byte >= 0 && last >= 0 && static_cast<uint64_t>(last) + item <= num_bytes;
  if (!fits) refuse("it reaches out of a buffer of " + std::to_string(num_bytes) + " bytes");
}

}  // namespace

uint64_t box_digest(const void* data, size_t num_bytes, const BoxLayout& box) {
  require_sane(num_bytes, box);
  return Walk(static_cast<const unsigned char*>(data), box).from(0, box.first_byte, 0);
}

}  // namespace unicron::state
