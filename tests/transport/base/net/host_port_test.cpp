#include "transport/base/net/host_port.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace kvferry::net {
namespace {

TEST(HostPort, IsParsedAndPrintedAlike) {
  for (const char* text : {"node-3.example:14600", "127.0.0.1:0", "*:65535", "[::1]:14600", "[fe80::1%eth0]:1"}) {
    const Result<HostPort> address = parse_host_port(text);
    ASSERT_TRUE(address) << text;
    EXPECT_EQ(to_text(*address), text);
  }
  EXPECT_EQ(parse_host_port("[::1]:14600").value(), (HostPort{"::1", 14600}));
}

TEST(HostPort, OtherFormsAreRefused) {
  for (const char* text : {"",           ":",       "host",     "host:",  ":1",    "host:-1",     "host:+1",
                           "host:65536", "host:1x", "host:1:2", "::1:80", "[::1]", "[::1",        "[]:1",
                           "[host]:1",   "[::1]80", "a b:1",    "a/b:1",  "a;b:1", "user@host:1", "host:\t1"}) {
    const Result<HostPort> address = parse_host_port(text);
    ASSERT_FALSE(address) << text;
    EXPECT_EQ(address.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(address.error().what, ::testing::HasSubstr("HOST:PORT"));
  }
}

TEST(PortRange, IsParsedOrRefused) {
  EXPECT_EQ(parse_port_range("").value(), PortRange{});
  EXPECT_EQ(parse_port_range("7000").value(), (PortRange{7000, 7000}));
  EXPECT_EQ(parse_port_range("7000-65535").value(), (PortRange{7000, 65535}));
  for (const char* text : {"0", "0-5", "8-7", "7-", "-7", "7-8-9", "7-65536", "a-b", "7 - 8", "+7"})
    EXPECT_FALSE(parse_port_range(text)) << text;
}

TEST(PortRange, TheFirstPortThatCanBeUsedIsTaken) {
  const auto only = [](std::uint16_t free) {
    return [free](std::uint16_t port) -> Result<std::uint16_t> {
      if (port == free) return port;
      return Error{ErrorCode::kUnavailable, "in use"};
    };
  };
  EXPECT_EQ(listen_in_range({7, 9}, only(9)).value(), 9);
  EXPECT_EQ(listen_in_range({65534, 65535}, only(65535)).value(), 65535);
  EXPECT_EQ(listen_in_range({}, only(0)).value(), 0);
  EXPECT_EQ(listen_in_range({7, 8}, only(9)).error().what, "none of the ports 7 to 8 can be used: in use");
  EXPECT_EQ(listen_in_range({7, 7}, only(9)).error().what, "in use");
}

TEST(HostPort, ThePortMayBeMissingIfThereIsADefault) {
  EXPECT_EQ(parse_host_port("host", 6379).value(), (HostPort{"host", 6379}));
  EXPECT_EQ(parse_host_port("[::1]", 6379).value(), (HostPort{"::1", 6379}));
  EXPECT_EQ(parse_host_port("host:1", 6379).value(), (HostPort{"host", 1}));
  EXPECT_FALSE(parse_host_port("host:", 6379));
}

TEST(HostPort, IsFoundInEndpointsOfTcpAndStream) {
  EXPECT_EQ(address_of_endpoint("tcp://[::1]:7"), (HostPort{"::1", 7}));
  EXPECT_EQ(address_of_endpoint("stream://host:7"), (HostPort{"host", 7}));
  for (const char* endpoint : {"unix:///run/kvferry", "ipc://host:7", "tcp://host", "host:7"})
    EXPECT_EQ(address_of_endpoint(endpoint), std::nullopt) << endpoint;
}

}  // namespace
}  // namespace kvferry::net
