// A file descriptor that closes itself, and the few things done to descriptors everywhere.
#pragma once

#include <cstddef>
#include <utility>

namespace unicron {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() { reset(); }

  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

Descriptor create_event();                                       // eventfd, non-blocking, close-on-exec; throws Error
void signal_event(int event_fd);                                 // makes it readable
void clear_event(int event_fd);                                  // makes it unreadable
size_t file_bytes(int fd);                                       // throws Error
Descriptor create_memory_file(const char* name, size_t nbytes);  // memfd whose size is sealed; throws Error

}  // namespace unicron
