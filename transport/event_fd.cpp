#include "transport/event_fd.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include "transport/base/check.h"

namespace kvferry {

EventFd::EventFd() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  KVFERRY_CHECK(fd_ >= 0, "no file descriptor left for an eventfd: {}", std::strerror(errno));
}

EventFd::~EventFd() { ::close(fd_); }

void EventFd::set() {
  const std::uint64_t one = 1;
  // EAGAIN means the counter is at its top, so the descriptor is readable already.
  const ssize_t written = ::write(fd_, &one, sizeof(one));
  KVFERRY_CHECK(written == sizeof(one) || errno == EAGAIN, "cannot signal an eventfd: {}", std::strerror(errno));
}

void EventFd::clear() {
  std::uint64_t count = 0;
  const ssize_t got = ::read(fd_, &count, sizeof(count));
  KVFERRY_CHECK(got == sizeof(count) || errno == EAGAIN, "cannot clear an eventfd: {}", std::strerror(errno));
}

}  // namespace kvferry
