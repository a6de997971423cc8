// A TCP socket with which a test can send any bytes.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "transport/tcp/messages.h"

namespace kvferry {

/// A socket with which a test can send any bytes.
class RawSocket {
 public:
  explicit RawSocket(int fd) : fd_(fd) {
    const timeval patience{30, 0};
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;
  ~RawSocket() { ::close(fd_); }

  static int connected_to(std::uint16_t port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)), 0);
    return fd;
  }
  void send(const std::string& bytes) {
    EXPECT_EQ(::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  /// Returns the next bytes. Returns fewer if the other side closes the connection first.
  std::string receive(std::size_t num_bytes) {
    std::string bytes(num_bytes, '\0');
    if (num_bytes == 0) return bytes;  // recv() would wait for a byte even if none is wanted
    const ssize_t got = ::recv(fd_, bytes.data(), num_bytes, MSG_WAITALL);
    bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
    return bytes;
  }
  struct Frame {
    tcp::MessageHeader header;
    std::string rest;  // entries, checksums and text
  };
  Frame receive_frame() {
    Frame frame;
    const std::string header = receive(sizeof(frame.header));
    EXPECT_EQ(header.size(), sizeof(frame.header)) << "the other side closed the connection";
    if (header.size() == sizeof(frame.header)) std::memcpy(&frame.header, header.data(), header.size());
    frame.rest = receive(tcp::head_bytes(frame.header) - sizeof(frame.header));
    return frame;
  }
  int fd() const { return fd_; }

 private:
  int fd_;
};

inline std::string frame(const tcp::MessageHeader& header, std::string_view text = {}) {
  std::string bytes;
  tcp::append_message(bytes, header, text);
  return bytes;
}

}  // namespace kvferry
