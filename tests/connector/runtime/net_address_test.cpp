#include "connector/runtime/net_address.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "tests/transport/base/net/ipv6.h"

namespace kvferry {
namespace {

using namespace std::chrono_literals;
using ::testing::Contains;
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
  if (own) {  // some hosts can't resolve their own name
    EXPECT_THAT(*own, MatchesRegex("[0-9]+\\.[0-9]+\\.[0-9]+\\.[0-9]+"));
  } else {
    EXPECT_THAT(own.error().what, HasSubstr(name));
  }
}

TEST(NetAddress, AnUnknownNameIsRefusedInASentence) {
  const Result<std::string> found = address_of_this_host("nobody.invalid", kController);
  ASSERT_FALSE(found);
  EXPECT_EQ(found.error().code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(found.error().what, HasSubstr("cannot resolve host 'nobody.invalid'"));
  EXPECT_THAT(found.error().what, HasSubstr("allowed: a name or an address of this host"));
}

TEST(NetAddress, BracketsAroundAnIpv6AddressAreRemoved) {
  EXPECT_EQ(address_of_this_host("[fd00::7]", kController).value(), "fd00::7");
}

TEST(NetAddress, TheFirstControllerOnANetworkDecides) {
  const std::vector<std::string> addresses = net::interface_addresses();
  if (addresses.empty()) GTEST_SKIP() << "this host has only loopback";
  const std::string routable = "tcp://" + net::to_text({addresses.front(), 14600});
  for (const std::string before : {"", "unix:///run/kvferry,", "ipc://socket,", "tcp://127.0.0.1:14600,",
                                   "tcp://localhost:1,stream://127.0.0.1:2,", "tcp://nobody.invalid:1,"}) {
    const AdvertisedHost selected = select_advertised_host(before + routable, 0ms);
    EXPECT_EQ(selected.host, addresses.front()) << before;
    EXPECT_EQ(selected.warning, "") << before;
  }
}

TEST(NetAddress, AControllerOnLoopbackIsReachedFromLoopback) {
  for (const char* controller : {"tcp://127.0.0.1:1", "tcp://localhost:1", "unix:///run/kvferry,tcp://127.0.0.1:1"}) {
    EXPECT_EQ(select_advertised_host(controller).host, "127.0.0.1") << controller;
    EXPECT_EQ(select_advertised_host(controller).warning, "") << controller;
  }
  SKIP_WITHOUT_IPV6();
  EXPECT_EQ(select_advertised_host("tcp://[::1]:14600").host, "::1");
  EXPECT_EQ(select_advertised_host("stream://[::1]:14600").host, "::1");
}

TEST(NetAddress, WithoutARouteThePrimaryAddressIsAdvertised) {
  const AdvertisedHost selected = select_advertised_host("unix:///run/kvferry");
  if (net::interface_addresses().empty()) {
    EXPECT_EQ(selected.host, "127.0.0.1");
    EXPECT_THAT(selected.warning, HasSubstr("set advertise_host"));
  } else {
    EXPECT_THAT(net::interface_addresses(), Contains(selected.host));
    EXPECT_EQ(selected.warning, "");
  }
}

TEST(NetAddress, AControllerThatCannotBeResolvedIsTriedAgainAndThenWarnedAbout) {
  const auto begin = std::chrono::steady_clock::now();
  const AdvertisedHost selected = select_advertised_host("tcp://nobody.invalid:1,tcp://127.0.0.1:1", 600ms);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 600ms);
  EXPECT_NE(selected.host, "");
  EXPECT_THAT(selected.warning, HasSubstr("advertise_host"));
  if (!net::interface_addresses().empty()) {
    EXPECT_THAT(selected.warning, HasSubstr("'nobody.invalid'"));
  }
}

}  // namespace
}  // namespace kvferry
