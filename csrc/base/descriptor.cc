#include "base/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "base/error.h"

namespace unicron {

void Descriptor::reset(int fd) {
  // Not repeated on EINTR: Linux has released the number by then.
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

Descriptor create_event() {
  const int fd = ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
  if (fd < 0) throw system_error("cannot create an eventfd", errno);
  return Descriptor(fd);
}

void signal_event(int event_fd) {
  const uint64_t one = 1;
  // EAGAIN means that the counter is full: it is readable already.
  [[maybe_unused]] const ssize_t written = ::write(event_fd, &one, sizeof(one));
}

void clear_event(int event_fd) {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = ::read(event_fd, &count, sizeof(count));
}

size_t file_bytes(int fd) {
  struct stat status{};
  if (::fstat(fd, &status) != 0) throw system_error("cannot stat descriptor " + std::to_string(fd), errno);
  return static_cast<size_t>(status.st_size);
}

Descriptor create_memory_file(const char* name, size_t nbytes) {
  Descriptor file(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!file.is_open()) throw system_error(std::string("cannot create memfd ") + name, errno);
  if (::ftruncate(file.get(), static_cast<off_t>(nbytes)) != 0) {
    throw system_error(std::string("cannot size memfd ") + name + " to " + std::to_string(nbytes) + " bytes", errno);
  }
  // A sealed size: no process that holds the descriptor can make another one's mapping fault with SIGBUS.
  if (::fcntl(file.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    throw system_error(std::string("cannot seal the size of memfd ") + name, errno);
  }
  return file;
}

}  // namespace unicron
