// Ports of 127.0.0.1 for servers that tests start.
#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>

#include <cstdint>
#include <random>
#include <stdexcept>

#include "transport/base/owned_fd.h"

namespace kvferry {

/// Returns a TCP port of 127.0.0.1 that is free now. It is below the ports that Linux gives to outgoing connections, so
/// that no connection takes it before the server listens, or while the server restarts.
inline std::uint16_t free_port() {
  std::random_device random;
  for (int attempts = 0; attempts < 1000; ++attempts) {
    const auto port = static_cast<std::uint16_t>(std::uniform_int_distribution(10'000, 32'767)(random));
    const OwnedFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::bind(fd.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0) return port;
  }
  throw std::runtime_error("no port is free");
}

}  // namespace kvferry
