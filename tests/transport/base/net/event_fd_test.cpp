#include "transport/base/net/event_fd.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>

namespace kvferry {
namespace {

bool is_readable(const EventFd& event) {
  pollfd waiting{event.fd(), POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

TEST(EventFd, IsReadableFromSetUntilClear) {
  const EventFd event;
  event.clear();
  EXPECT_FALSE(is_readable(event));
  event.set();
  event.set();
  EXPECT_TRUE(is_readable(event));
  event.clear();
  EXPECT_FALSE(is_readable(event));
}

TEST(EventFd, WithoutADescriptorItDoesNothing) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none{0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const EventFd event(std::nothrow);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_LT(event.fd(), 0);
  event.set();
  event.clear();
}

}  // namespace
}  // namespace kvferry
