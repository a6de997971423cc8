// Tests the client of the event log with a real Redis that is killed, stopped and emptied.
#include "controller/scale/redis_stream.h"

#include <gmock/gmock.h>
#include <poll.h>

#include <cstdio>
#include <set>

#include "tests/controller/scale/services.h"
#include "transport/base/clock.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller::scale {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

/// Returns true once the stream has failed; until its first reply it has a reason too.
bool has_failed(const RedisStream& stream) {
  const std::string trouble = stream.state().trouble;
  return !trouble.empty() && trouble.find("not replied yet") == std::string::npos;
}

class RedisStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!RedisService::is_here()) GTEST_SKIP() << "redis-server is not installed (Debian's redis-server)";
    service = std::make_unique<RedisService>();
  }
  std::unique_ptr<RedisStream> stream(const std::string& more = "", std::int64_t reply_ms = 500) const {
    return make_redis_stream({.url = parse_redis_url(service->url() + more).value(),
                              .reply_ms = reply_ms,
                              .retry_ms_max = 200,
                              .buffer_bytes_max = 1 << 20,
                              .trim_ms = 100});
  }
  std::string ask(const std::string& command) const {
    std::string output;
    std::FILE* pipe = ::popen(fmt::format("redis-cli -p {} {}", service->process().port(), command).c_str(), "r");
    for (int c = std::fgetc(pipe); c != EOF; c = std::fgetc(pipe)) output += static_cast<char>(c);
    ::pclose(pipe);
    return output;
  }
  std::unique_ptr<RedisService> service;
};

struct Reading {
  explicit Reading(RedisStream& of) : stream(of) { stream.start_reading(); }
  bool wait(const std::function<bool()>& reached) {
    return wait_until([&] {
      pollfd item{stream.fd(), POLLIN, 0};
      ::poll(&item, 1, 5);
      for (LogPart& part : stream.take()) {
        at_end = part.at_end;
        entries.insert(entries.end(), part.entries.begin(), part.entries.end());
      }
      return reached();
    });
  }
  RedisStream& stream;
  std::vector<std::string> entries;
  bool at_end = false;
};

std::vector<std::string> numbered(int from, int to) {
  std::vector<std::string> entries;
  for (int i = from; i < to; ++i) entries.push_back(std::to_string(i) + std::string("\0\r\n\xff", 4));
  return entries;
}

TEST_F(RedisStreamTest, ALateReaderGetsWhatWasAppendedAndWhatFollows) {
  const auto writer = stream();
  for (const std::string& entry : numbered(0, 500)) ASSERT_TRUE(writer->append(entry));
  ASSERT_TRUE(wait_until([&] { return writer->state().num_appended == 500; }));
  EXPECT_EQ(writer->state().buffered_bytes, 0U);
  const auto reader = stream();
  Reading reading(*reader);
  ASSERT_TRUE(reading.wait([&] { return reading.at_end; }));
  EXPECT_EQ(reading.entries, numbered(0, 500));
  for (const std::string& entry : numbered(500, 600)) ASSERT_TRUE(writer->append(entry));
  ASSERT_TRUE(reading.wait([&] { return reading.entries.size() >= 600; }));
  EXPECT_EQ(reading.entries, numbered(0, 600));
}

TEST(RedisStream, NamesWhyThereIsNoConnection) {
  auto silent = net::listen_tcp("127.0.0.1", 0).value();
  const auto trouble_at = [](const net::HostPort& address, const std::string& what) {
    const std::string url = "redis://" + net::to_text(address);
    const auto stream = make_redis_stream({.url = parse_redis_url(url).value(), .reply_ms = 200, .retry_ms_max = 200});
    EXPECT_TRUE(wait_until([&] { return has_failed(*stream); }));
    EXPECT_THAT(stream->state().trouble, HasSubstr(what));
  };
  trouble_at(silent.address, "failed: no reply came within 200 ms");
  silent.socket = OwnedFd();
  trouble_at(silent.address, "failed: Connection refused");
}

TEST(RedisStreamEnd, WaitsForNoReplyOfAServerThatIsSilent) {
  const net::TcpListener silent = net::listen_tcp("127.0.0.1", 0).value();  // the kernel accepts connections
  const std::string url = "redis://" + net::to_text(silent.address);
  const SteadyClock clock;
  const TimeNs begun = clock.now();
  for (int i = 0; i < 300; ++i) {
    const auto stream = make_redis_stream({.url = parse_redis_url(url).value(), .reply_ms = 60'000});
    EXPECT_THAT(stream->state().trouble, HasSubstr("has not replied yet"));
    // The stream ends before, while and after it connects.
    for (const TimeNs until = clock.now() + i * 1000; clock.now() < until;) {
    }
  }
  EXPECT_LT(clock.now() - begun, 30 * kSecond);
}

TEST_F(RedisStreamTest, StreamsAndDatabasesAreApart) {
  const auto here = stream("/1?stream=one");
  const auto there = stream("/1?stream=two");
  const auto elsewhere = stream("/2?stream=one");
  here->append("x");
  there->append("y");
  ASSERT_TRUE(wait_until([&] { return here->state().num_appended + there->state().num_appended == 2; }));
  Reading reading(*here);
  Reading nothing(*elsewhere);
  ASSERT_TRUE(reading.wait([&] { return !reading.entries.empty(); }));
  EXPECT_EQ(reading.entries, std::vector<std::string>{"x"});
  ASSERT_TRUE(nothing.wait([&] { return nothing.at_end; }));
  EXPECT_TRUE(nothing.entries.empty());
}

TEST_F(RedisStreamTest, WhatWasAppendedWhileRedisWasGoneArrivesInOrder) {
  const auto writer = stream();
  const auto reader = stream();
  Reading reading(*reader);
  for (const std::string& entry : numbered(0, 50)) ASSERT_TRUE(writer->append(entry));
  ASSERT_TRUE(reading.wait([&] { return reading.entries.size() == 50; }));
  service->process().kill();
  for (const std::string& entry : numbered(50, 100)) ASSERT_TRUE(writer->append(entry));
  ASSERT_TRUE(wait_until([&] { return !writer->state().is_connected; }));
  EXPECT_THAT(writer->state().trouble, HasSubstr("127.0.0.1"));
  service->process().start();
  ASSERT_TRUE(reading.wait([&] { return reading.entries.size() >= 100; }));
  ASSERT_TRUE(wait_until([&] { return writer->state().buffered_bytes == 0; }));
  EXPECT_TRUE(writer->state().is_connected);
  EXPECT_EQ(writer->state().trouble, "");
  // Some entries may be there twice, because Redis had stored them when it died.
  std::vector<std::string> once;
  std::set<std::string> known;
  for (const std::string& entry : reading.entries) {
    if (known.insert(entry).second) once.push_back(entry);
  }
  EXPECT_EQ(once, numbered(0, 100));
}

TEST_F(RedisStreamTest, AFullBufferTakesNoMoreAndNeverWaits) {
  const auto writer = stream();
  ASSERT_TRUE(writer->append("first"));
  ASSERT_TRUE(wait_until([&] { return writer->state().num_appended == 1; }));
  service->process().stop();
  const std::string entry(10'000, 'x');
  const auto begin = std::chrono::steady_clock::now();
  std::size_t num_taken = 0;
  for (int i = 0; i < 1000; ++i) num_taken += writer->append(entry) ? 1U : 0U;
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  EXPECT_EQ(num_taken, (std::size_t{1} << 20) / entry.size());
  EXPECT_LE(writer->state().buffered_bytes, std::size_t{1} << 20);
  ASSERT_TRUE(wait_until([&] { return !writer->state().is_connected; })) << "silence is noticed";
  service->process().go_on();
  ASSERT_TRUE(wait_until([&] { return writer->state().buffered_bytes == 0; }));
  EXPECT_TRUE(writer->append(entry));
}

TEST_F(RedisStreamTest, AnEmptiedRedisIsWrittenAndReadAnew) {
  const auto writer = stream();
  for (const std::string& entry : numbered(0, 50)) ASSERT_TRUE(writer->append(entry));
  const auto reader = stream();
  Reading reading(*reader);
  ASSERT_TRUE(reading.wait([&] { return reading.entries.size() == 50; }));
  service->restart_empty();
  for (const std::string& entry : numbered(50, 60)) ASSERT_TRUE(writer->append(entry));
  const auto late = stream();
  Reading anew(*late);
  ASSERT_TRUE(anew.wait([&] { return anew.entries.size() >= 10; }));
  EXPECT_EQ(anew.entries, numbered(50, 60));
  EXPECT_TRUE(reading.wait([&] { return reading.entries.size() >= 60; })) << "ids are times, and time went on";
}

TEST_F(RedisStreamTest, TheStreamTakesNoMoreMemoryThanItMay) {
  const auto writer = stream("?bytes=1048576");
  const std::string entry(20'000, 'x');
  std::uint64_t num_sent = 0;
  ASSERT_TRUE(wait_until([&] {
    num_sent += writer->append(entry) ? 1U : 0U;
    return num_sent >= 1000;
  }));
  ASSERT_TRUE(wait_until([&] { return writer->state().num_appended == num_sent; }));
  EXPECT_TRUE(wait_until([&] { return std::stol(ask("--raw MEMORY USAGE kvferry:events")) <= 1'048'576; }))
      << ask("MEMORY USAGE kvferry:events");
  EXPECT_GT(std::stol(ask("--raw XLEN kvferry:events")), 5);
}

TEST_F(RedisStreamTest, PasswordsAreSaidToRedisAlone) {
  service = std::make_unique<RedisService>(std::vector<std::string>{"--requirepass", "open:sesame"});
  const std::string place = service->url().substr(8);
  const auto open = [&](const std::string& login) {
    return make_redis_stream({.url = parse_redis_url("redis://" + login + place).value(), .retry_ms_max = 200});
  };
  const auto good = open(":open%3Asesame@");
  const auto named = open("default:open%3Asesame@");
  const auto wrong = open(":guess@");
  const auto none = open("");
  good->append("x");
  named->append("y");
  none->append("z");
  EXPECT_TRUE(wait_until([&] { return good->state().num_appended == 1 && named->state().num_appended == 1; }));
  EXPECT_TRUE(wait_until([&] { return has_failed(*wrong) && has_failed(*none); }));
  EXPECT_THAT(wrong->state().trouble, Not(HasSubstr("guess")));
  EXPECT_THAT(none->state().trouble, HasSubstr("uthenti"));
}

TEST_F(RedisStreamTest, AKeyOfAnotherKindIsToldAndHarmless) {
  ask("SET kvferry:events 1");
  const auto writer = stream();
  writer->append("x");
  EXPECT_TRUE(wait_until([&] { return has_failed(*writer); }));
  EXPECT_THAT(writer->state().trouble, HasSubstr("WRONGTYPE"));
  ask("DEL kvferry:events");
  EXPECT_TRUE(wait_until([&] { return writer->state().num_appended == 1; }));
}

TEST_F(RedisStreamTest, ItEndsAtOnceWhateverRedisDoes) {
  auto writer = stream("", 60'000);
  writer->append("x");
  ASSERT_TRUE(wait_until([&] { return writer->state().num_appended == 1; }));
  service->process().stop();
  writer->append("y");
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  const auto begin = std::chrono::steady_clock::now();
  writer.reset();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

TEST(ScaleUrls, BadOnesAreToldWithoutTheirSecrets) {
  for (const char* text :
       {"", "localhost:2379", "https://u:hidden@h:1", "http://", "http://h", "http://h:0", "http://u:hidden@h:99999",
        "http://u:hidden@h:1/a,http://h:2", "http://h:1,,http://h:2", "http://u:hid%0aden@h:1"}) {
    const auto url = parse_etcd_url(text);
    ASSERT_FALSE(url) << text;
    EXPECT_THAT(url.error().what, HasSubstr("http://HOST:PORT")) << text;
    EXPECT_THAT(url.error().what, Not(HasSubstr("hid"))) << text;
  }
  for (const char* text : {"", "h:6379", "rediss://:hidden@h", "redis://", "redis://:hidden@h:0", "redis://h/x",
                           "redis://h?bytes=5", "redis://h?strm=x", "redis://:hidden@h:1/1?stream="}) {
    const auto url = parse_redis_url(text);
    ASSERT_FALSE(url) << text;
    EXPECT_THAT(url.error().what, HasSubstr("redis://HOST")) << text;
    EXPECT_THAT(url.error().what, Not(HasSubstr("hidden"))) << text;
  }
}

TEST(ScaleUrls, GoodOnesAreUnderstood) {
  const EtcdUrl etcd = parse_etcd_url("http://a:1,http://u:p%40@[::1]:2,c:3/x/y").value();
  ASSERT_EQ(etcd.members.size(), 3U);
  EXPECT_EQ(etcd.members[1].host_port(), "[::1]:2");
  EXPECT_EQ(etcd.members[1].password, "p@");
  EXPECT_EQ(etcd.members[2].address.host, "c");
  EXPECT_EQ(etcd.prefix, "x/y");
  EXPECT_EQ(parse_etcd_url("http://a:1").value().prefix, "kvferry");
  const RedisUrl redis = parse_redis_url("redis://u:p@h/3?stream=s&bytes=2000000").value();
  EXPECT_EQ(redis.server.address.port, 6379);
  EXPECT_EQ(redis.database, 3);
  EXPECT_EQ(redis.stream, "s");
  EXPECT_EQ(redis.bytes_max, 2'000'000U);
}

}  // namespace
}  // namespace kvferry::controller::scale
