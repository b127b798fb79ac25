// A shared mapping of a file that unmaps itself.
#pragma once

#include <cstddef>

namespace unicron {

constexpr size_t kPageBytes = 4096;

class SharedMapping {
 public:
  // Maps `nbytes` of `fd` from `offset`, readable and writable. Throws Error.
  SharedMapping(int fd, size_t offset, size_t nbytes);
  SharedMapping(const SharedMapping&) = delete;
  SharedMapping& operator=(const SharedMapping&) = delete;
  ~SharedMapping();

  void* data() const { return data_; }

 private:
  void* data_;
  size_t nbytes_;
};

}  // namespace unicron
