#include "base/mapping.h"

#include <errno.h>
#include <sys/mman.h>

#include <string>

#include "base/error.h"

namespace unicron {

SharedMapping::SharedMapping(int fd, size_t offset, size_t nbytes) : nbytes_(nbytes) {
  data_ = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (data_ == MAP_FAILED) {
    throw system_error("cannot map " + std::to_string(nbytes) + " bytes of descriptor " + std::to_string(fd), errno);
  }
}

SharedMapping::~SharedMapping() { ::munmap(data_, nbytes_); }

}  // namespace unicron
