#include "transport/base/net/event_fd.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>

#include "transport/base/check.h"

namespace kvferry {

EventFd::EventFd(std::nothrow_t) : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

EventFd::EventFd() : EventFd(std::nothrow) {
  KVFERRY_CHECK(fd_, "cannot create an eventfd: {}; if descriptors are used up, raise the limit (ulimit -n)",
                std::strerror(errno));
}

// set() and clear() fail only in ways that do not matter: if there is no descriptor, or if the counter is at its
// maximum or already zero.
void EventFd::set() const { ::eventfd_write(fd_.get(), 1); }

void EventFd::clear() const {
  eventfd_t count = 0;
  ::eventfd_read(fd_.get(), &count);
}

}  // namespace kvferry
