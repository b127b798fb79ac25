// Sockets of this process: which are connected, and how one is ended so that whoever blocks on it wakes.
#pragma once

#include <sys/types.h>

#include <vector>

namespace unicron::monitor {

// A connected socket as it was at one time. The number alone may since stand for another file.
struct SocketIdentity {
  int fd;
  ino_t inode;
};

// Connected, not listening, stream sockets of AF_INET or AF_INET6, in ascending order.
std::vector<SocketIdentity> connected_sockets();

// False when the descriptor is another file by now, or its connection ended.
bool is_still_connected(const SocketIdentity& socket);

// shutdown(SHUT_RDWR) when the descriptor still is that connected socket. True when it was shut.
bool shut_socket(const SocketIdentity& socket);

}  // namespace unicron::monitor
