// What client, server and status share around ZeroMQ. Private to controller/*.cpp.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <optional>
#include <string>
#include <string_view>
#include <zmq.hpp>

#include "transport/base/result.h"

namespace kvferry::controller {

/// A file descriptor with one owner.
class OwnedFd {
 public:
  explicit OwnedFd(int fd) : fd_(fd) {}
  OwnedFd(const OwnedFd&) = delete;
  OwnedFd& operator=(const OwnedFd&) = delete;
  ~OwnedFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

/// Readable from raise() until clear(). raise() is async-signal-safe.
class WakeUp {
 public:
  WakeUp() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}
  int fd() const { return fd_.get(); }
  void raise() const { ::eventfd_write(fd_.get(), 1); }
  void clear() const {
    eventfd_t count = 0;
    ::eventfd_read(fd_.get(), &count);
  }

 private:
  OwnedFd fd_;
};

/// Limits that hold for every socket here.
void set_common_options(zmq::socket_t& socket, std::string_view endpoint);

/// False: no room or no connection; the message is dropped. Never blocks, never throws.
bool try_send(zmq::socket_t& socket, std::string_view bytes, zmq::send_flags more = zmq::send_flags::none);

/// One whole message of up to `frames.size()` frames, or none waiting. Never blocks, never throws.
/// The count tells how many frames came in truth; those that didn't fit are gone.
std::size_t try_receive(zmq::socket_t& socket, zmq::message_t* frames, std::size_t num_frames_max);

}  // namespace kvferry::controller
