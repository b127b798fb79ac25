// Host memory that a GPU writes words into, in the order of its stream: no thread waits, and what was begun on the
// stream before a word is done when the word can be read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu/driver_api.h"

namespace unicron::gpu {

class HostPage {
 public:
  // `data`: page-aligned memory that outlives this object. Nothing is asked of a driver until the first write.
  HostPage(void* data, size_t nbytes) : data_(data), nbytes_(nbytes) {}
  HostPage(const HostPage&) = delete;
  HostPage& operator=(const HostPage&) = delete;
  ~HostPage();

  // *word (8 bytes, inside of the memory) becomes `value` when the stream gets here. Throws Error.
  void write_on_stream(const void* word, uint64_t value, int device, Stream stream);

 private:
  void* data_;
  size_t nbytes_;
  DevicePointer on_device_ = 0;  // 0 until the first write
  int device_ = 0;               // of the first
};

}  // namespace unicron::gpu
