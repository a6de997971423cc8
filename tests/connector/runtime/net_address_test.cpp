#include "connector/runtime/net_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using ::testing::MatchesRegex;

const std::string kController = "tcp://127.0.0.1:14600";

TEST(NetAddress, AnAddressStaysAsItIs) {
  for (const char* address : {"10.0.0.7", "127.0.0.2", "fd00::7"})
    EXPECT_EQ(address_of_this_host(address, kController).value(), address);
}

TEST(NetAddress, ANameBecomesAnAddress) {
  EXPECT_EQ(address_of_this_host("localhost", kController).value(), "127.0.0.1");
  char name[256] = "";
  ASSERT_EQ(::gethostname(name, sizeof name - 1), 0);
  const Result<std::string> own = address_of_this_host(name, kController);
  if (own) {  // not every host knows its own name
    EXPECT_THAT(*own, MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+"));
  } else {
    EXPECT_THAT(own.error().what, HasSubstr(name));
  }
}

TEST(NetAddress, AnUnknownNameIsRefusedInASentence) {
  const Result<std::string> found = address_of_this_host("nobody.invalid", kController);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(found.error().what, HasSubstr("'nobody.invalid' is no host that is known here"));
  EXPECT_THAT(found.error().what, HasSubstr("allowed: a name or an address of this host"));
}

}  // namespace
}  // namespace kvferry
