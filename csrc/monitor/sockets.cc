#include "monitor/sockets.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>

#include "base/descriptor.h"
#include "base/error.h"

namespace unicron::monitor {

namespace {

std::optional<int> socket_option(int fd, int option) {
  int value = 0;
  socklen_t length = sizeof(value);
  if (::getsockopt(fd, SOL_SOCKET, option, &value, &length) != 0) return std::nullopt;
  return value;
}

bool is_listening(int fd) { return socket_option(fd, SO_ACCEPTCONN).value_or(0) != 0; }

bool has_peer(int fd) {
  sockaddr_storage peer{};
  socklen_t length = sizeof(peer);
  return ::getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &length) == 0;
}

bool is_connected_stream(int fd) {
  const std::optional<int> domain = socket_option(fd, SO_DOMAIN);  // fails at once for what is no socket
  if (domain != AF_INET && domain != AF_INET6) return false;
  return socket_option(fd, SO_TYPE) == SOCK_STREAM && !is_listening(fd) && has_peer(fd);
}

}  // namespace

std::vector<SocketIdentity> connected_sockets() {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir("/proc/self/fd"), ::closedir);
  if (directory == nullptr) throw system_error("cannot list /proc/self/fd", errno);
  std::vector<SocketIdentity> result;
  while (const dirent* entry = ::readdir(directory.get())) {
    if (entry->d_name[0] == '.') continue;
    const int fd = std::atoi(entry->d_name);
    struct stat status{};
    if (is_connected_stream(fd) && ::fstat(fd, &status) == 0) result.push_back({fd, status.st_ino});
  }
  std::sort(result.begin(), result.end(), [](const auto& left, const auto& right) { return left.fd < right.fd; });
  return result;
}

bool is_still_connected(const SocketIdentity& socket) {
  struct stat status{};
  if (::fstat(socket.fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  return status.st_ino == socket.inode && has_peer(socket.fd);
}

bool shut_socket(const SocketIdentity& socket) {
  // The owner may close the number at any moment and the kernel hand it out again. A duplicate stands for one open
  // file, so what is checked is what is shut.
  const Descriptor copy(::fcntl(socket.fd, F_DUPFD_CLOEXEC, 3));
  if (!copy.is_open()) return false;
  struct stat status{};
  if (::fstat(copy.get(), &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  if (status.st_ino != socket.inode || is_listening(copy.get())) return false;
  return ::shutdown(copy.get(), SHUT_RDWR) == 0;
}

}  // namespace unicron::monitor
