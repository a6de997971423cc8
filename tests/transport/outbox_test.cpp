#include "transport/outbox.h"

#include <gtest/gtest.h>
#include <poll.h>

namespace kvferry {
namespace {

bool is_readable(const Outbox& outbox) {
  pollfd waiting{outbox.event_fd(), POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

TEST(Outbox, IsReadableUntilBothKindsAreTaken) {
  Outbox outbox;
  EXPECT_FALSE(is_readable(outbox));
  outbox.complete({TransferId{1}, ErrorCode::kOk, ""});
  EXPECT_TRUE(outbox.notify({"from", "body"}));
  EXPECT_EQ(outbox.take_completions().size(), 1U);
  EXPECT_TRUE(is_readable(outbox));
  EXPECT_EQ(outbox.take_notifications().size(), 1U);
  EXPECT_FALSE(is_readable(outbox));
}

TEST(Outbox, RefusesNotificationsThatNobodyReads) {
  Outbox outbox;
  for (std::size_t index = 0; index < Outbox::kNotificationsMax; ++index) ASSERT_TRUE(outbox.notify({"", ""}));
  EXPECT_FALSE(outbox.notify({"", ""}));
  EXPECT_EQ(outbox.take_notifications().size(), Outbox::kNotificationsMax);
  EXPECT_TRUE(outbox.notify({"", ""}));
}

}  // namespace
}  // namespace kvferry
