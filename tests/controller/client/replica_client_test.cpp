// Tests that a client of several controllers keeps its promises about lookups if no controller answers.
#include <gtest/gtest.h>

#include <algorithm>

#include "controller/api/client.h"

namespace kvferry::controller {
namespace {

TEST(ReplicaClient, EachLookupEndsOrIsRefused) {
  ClientOptions options;
  options.controller = "tcp://127.0.0.1:1,tcp://127.0.0.1:2";  // no process listens at these ports
  options.lookup_timeout_ms = 1000;
  const std::unique_ptr<Client> client = make_client(options).value();
  LookupQuery query;
  query.keys.resize(1);
  std::size_t num_accepted = 0;
  Result<std::uint64_t> asked = client->lookup(query);
  for (; asked && num_accepted < 100'000; asked = client->lookup(query)) ++num_accepted;
  EXPECT_GT(num_accepted, 1000u);
  ASSERT_FALSE(asked);
  EXPECT_EQ(asked.error().code, ErrorCode::kFull);

  std::size_t num_failed = 0;
  for (const TimeNs now : {kSecond, 2 * kSecond}) {
    for (const ClientEvent& event : client->process(now)) num_failed += std::holds_alternative<LookupFailed>(event);
  }
  EXPECT_EQ(num_failed, num_accepted) << "a lookup was dropped without a word";
  EXPECT_TRUE(client->lookup(query)) << "there is room again";
}

}  // namespace
}  // namespace kvferry::controller
