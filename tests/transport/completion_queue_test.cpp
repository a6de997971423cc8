#include "transport/completion_queue.h"

#include <gtest/gtest.h>
#include <poll.h>

namespace kvferry {
namespace {

bool is_readable(const CompletionQueue& completion_queue) {
  pollfd waiting{completion_queue.event_fd(), POLLIN, 0};
  return ::poll(&waiting, 1, 0) == 1;
}

TEST(CompletionQueue, IsReadableUntilBothKindsAreTaken) {
  CompletionQueue completion_queue;
  EXPECT_FALSE(is_readable(completion_queue));
  completion_queue.complete({TransferId{1}, ErrorCode::kOk, ""});
  EXPECT_TRUE(completion_queue.notify({"from", "body"}));
  EXPECT_EQ(completion_queue.take_completions().size(), 1U);
  EXPECT_TRUE(is_readable(completion_queue));
  EXPECT_EQ(completion_queue.take_notifications().size(), 1U);
  EXPECT_FALSE(is_readable(completion_queue));
}

TEST(CompletionQueue, RefusesNotificationsThatNobodyReads) {
  CompletionQueue completion_queue;
  for (std::size_t index = 0; index < CompletionQueue::kNotificationsMax; ++index)
    ASSERT_TRUE(completion_queue.notify({"", ""}));
  EXPECT_FALSE(completion_queue.notify({"", ""}));
  EXPECT_EQ(completion_queue.take_notifications().size(), CompletionQueue::kNotificationsMax);
  EXPECT_TRUE(completion_queue.notify({"", ""}));
}

}  // namespace
}  // namespace kvferry
