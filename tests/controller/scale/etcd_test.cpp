// Tests the client of etcd with a real etcd that is killed, stopped, emptied and compacted.
#include "controller/scale/etcd.h"

#include <gmock/gmock.h>
#include <httplib.h>
#include <poll.h>

#include <map>

#include "tests/controller/scale/services.h"

namespace kvferry::controller::scale {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

/// Keeps the keys that it watches, as a replica would.
class Watcher {
 public:
  explicit Watcher(const std::string& url, std::int64_t quiet_ms = 300, std::int64_t request_ms = 5000)
      : etcd_(make_etcd({.url = parse_etcd_url(url).value(),
                         .watched_prefix = "kv/",
                         .request_ms = request_ms,
                         .quiet_ms = quiet_ms,
                         .retry_ms_max = 200})) {}

  void turn() {
    pollfd item{etcd_->fd(), POLLIN, 0};
    ::poll(&item, 1, 5);
    for (EtcdEvent& event : etcd_->take(16)) std::visit([this](auto& body) { on(body); }, event);
  }
  bool wait(const std::function<bool()>& reached) {
    return wait_until([&] {
      turn();
      return reached();
    });
  }
  EtcdReply ask(EtcdRequest request) {
    const std::uint64_t token = ++last_token_;
    etcd_->ask(token, std::move(request));
    EXPECT_TRUE(wait([&] { return replies_.contains(token); }));
    return replies_[token];
  }
  /// Repeats a request until it succeeds, whatever happens to etcd meanwhile.
  EtcdReply insist(const EtcdRequest& request) {
    EtcdReply reply;
    EXPECT_TRUE(wait_until([&] {
      reply = ask(request);
      return !reply.error;
    }));
    return reply;
  }
  EtcdReply put(const std::string& key, const std::string& value, std::int64_t mod_revision = 0,
                std::int64_t lease = 0) {
    return ask(EtcdPut{{key, value, mod_revision, lease}});
  }

  std::map<std::string, std::string> seen;
  int num_all = 0;
  int num_lost = 0;
  std::string lost_because;
  Etcd& etcd() { return *etcd_; }

 private:
  void on(EtcdReply& reply) { replies_[reply.token] = reply; }
  void on(EtcdAll& all) {
    seen.clear();
    ++num_all;
    for (const EtcdPair& pair : all.pairs) seen[pair.key] = pair.value;
  }
  void on(EtcdChanges& changes) {
    for (const auto& change : changes.changes) {
      if (const auto* pair = std::get_if<EtcdPair>(&change)) seen[pair->key] = pair->value;
      if (const auto* erased = std::get_if<EtcdErased>(&change)) seen.erase(erased->key);
    }
  }
  void on(EtcdLost& lost) {
    ++num_lost;
    lost_because = lost.reason;
  }

  std::unique_ptr<Etcd> etcd_;
  std::map<std::uint64_t, EtcdReply> replies_;
  std::uint64_t last_token_ = 0;
};

class EtcdTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!EtcdService::is_here()) GTEST_SKIP() << "etcd is not installed (Debian's etcd-server)";
    service = std::make_unique<EtcdService>();
    Watcher ready(service->url());  // etcd listens before it has a leader
    ASSERT_TRUE(ready.wait([&] { return ready.num_all == 1; }));
  }
  bool post(const std::string& path, const std::string& body) const {
    const auto response = httplib::Client(service->url()).Post(path, body, "application/json");
    return response && response->status == 200;
  }
  std::unique_ptr<EtcdService> service;
};

TEST_F(EtcdTest, WhatIsPutIsSeenByWhoWatches) {
  Watcher a(service->url());
  Watcher b(service->url());
  ASSERT_TRUE(b.wait([&] { return b.num_all == 1; }));
  const EtcdReply first = a.put("kv/x", std::string("1\0\xff", 3));
  ASSERT_FALSE(first.error);
  EXPECT_TRUE(first.done);
  a.put("other/x", "not watched");
  EXPECT_TRUE(b.wait([&] { return b.seen["kv/x"] == std::string("1\0\xff", 3); }));
  EXPECT_TRUE(a.put("kv/x", "2", first.revision).done);
  EXPECT_TRUE(b.wait([&] { return b.seen["kv/x"] == "2"; }));
  EXPECT_FALSE(a.ask(EtcdErase{"kv/x", first.revision}).done) << "it has changed since";
  EXPECT_TRUE(a.ask(EtcdErase{"kv/x", first.revision + 2}).done);
  EXPECT_TRUE(b.wait([&] { return b.seen.empty(); }));
  EXPECT_EQ(b.num_all, 1) << "nothing broke";
}

TEST_F(EtcdTest, OfTwoThatWriteOneWinsAndTheOtherIsToldWhatStandsThere) {
  Watcher a(service->url());
  Watcher b(service->url());
  ASSERT_TRUE(a.put("kv/x", "from a").done);
  const EtcdReply second = b.put("kv/x", "from b");
  ASSERT_FALSE(second.error);
  EXPECT_FALSE(second.done);
  ASSERT_TRUE(second.found);
  EXPECT_EQ(second.found->value, "from a");
  EXPECT_TRUE(b.put("kv/x", "from b", second.found->mod_revision).done);
  EXPECT_FALSE(b.put("kv/none", "new", 77).done);
  EXPECT_FALSE(b.put("kv/none", "new", 77).found);
}

TEST_F(EtcdTest, ALeaseThatIsNotKeptAliveTakesItsKeysAlong) {
  Watcher a(service->url());
  const EtcdReply granted = a.ask(EtcdGrant{.ttl_s = 2});
  ASSERT_FALSE(granted.error);
  ASSERT_TRUE(a.put("kv/x", "1", 0, granted.lease).done);
  for (int i = 0; i < 6; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
    EXPECT_EQ(a.ask(EtcdKeepAlive{granted.lease}).ttl_s, 2);
  }
  EXPECT_EQ(a.seen.count("kv/x"), 1U) << "kept alive for longer than it would last";
  EXPECT_TRUE(a.wait([&] { return a.seen.empty(); }));
  EXPECT_EQ(a.ask(EtcdKeepAlive{granted.lease}).ttl_s, 0);
  const EtcdReply late = a.put("kv/x", "1", 0, granted.lease);
  ASSERT_TRUE(late.error);
  EXPECT_EQ(late.error->code, ErrorCode::kNotFound) << late.error->what;
  const EtcdReply other = a.ask(EtcdGrant{.ttl_s = 60});
  ASSERT_TRUE(a.put("kv/y", "1", 0, other.lease).done);
  EXPECT_FALSE(a.ask(EtcdRevoke{other.lease}).error);
  EXPECT_TRUE(a.wait([&] { return a.seen.empty(); })) << "a revoked lease ends at once";
}

TEST_F(EtcdTest, AKilledEtcdIsToldOfAndFoundAgain) {
  Watcher a(service->url());
  ASSERT_TRUE(a.put("kv/x", "1").done);
  ASSERT_TRUE(a.wait([&] { return a.seen.count("kv/x") == 1; }));
  service->process().kill();
  ASSERT_TRUE(a.wait([&] { return a.num_lost == 1; }));
  const EtcdReply failed = a.put("kv/y", "1");
  ASSERT_TRUE(failed.error);
  EXPECT_EQ(failed.error->code, ErrorCode::kUnavailable);
  EXPECT_THAT(failed.error->what, HasSubstr("127.0.0.1"));
  service->process().start();
  ASSERT_TRUE(a.wait([&] { return a.num_all == 2; }));
  EXPECT_THAT(a.seen, ElementsAre(Pair("kv/x", "1")));
  a.insist(EtcdPut{{"kv/y", "2", 0, 0}});
  EXPECT_TRUE(a.wait([&] { return a.seen["kv/y"] == "2"; }));
  EXPECT_EQ(a.num_lost, 1);
}

TEST_F(EtcdTest, AnEmptiedEtcdIsSeenEmpty) {
  Watcher a(service->url());
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(a.put("kv/" + std::to_string(i), "1").done);
  ASSERT_TRUE(a.wait([&] { return a.seen.size() == 20; }));
  service->restart_empty();
  ASSERT_TRUE(a.wait([&] { return a.num_all == 2; }));
  EXPECT_TRUE(a.seen.empty());
  a.insist(EtcdPut{{"kv/new", "1", 0, 0}});
  EXPECT_TRUE(a.wait([&] { return a.seen.size() == 1; })) << "its revisions began anew, and are watched from there";
}

TEST_F(EtcdTest, AStoppedEtcdHoldsNobodyUp) {
  Watcher a(service->url(), /*quiet_ms=*/300, /*request_ms=*/1000);
  ASSERT_TRUE(a.wait([&] { return a.num_all == 1; }));
  service->process().stop();
  const auto begin = std::chrono::steady_clock::now();
  a.etcd().ask(1000, EtcdGrant{.ttl_s = 5});
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(500)) << "asking does not wait";
  ASSERT_TRUE(a.wait([&] { return a.num_lost == 1; })) << "silence is noticed";
  service->process().go_on();
  ASSERT_TRUE(a.wait([&] { return a.num_all == 2; }));
  a.insist(EtcdPut{{"kv/x", "1", 0, 0}});
  EXPECT_TRUE(a.wait([&] { return a.seen.size() == 1; }));
}

TEST_F(EtcdTest, QuietWatchesGoOnWithoutReadingAllAgain) {
  Watcher a(service->url(), /*quiet_ms=*/100);
  ASSERT_TRUE(a.wait([&] { return a.num_all == 1; }));
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(250));
    const std::string key = "kv/" + std::to_string(i);
    ASSERT_TRUE(a.put(key, "1").done);
    ASSERT_TRUE(a.wait([&] { return a.seen.count(key) == 1; })) << i;
  }
  EXPECT_EQ(a.num_all, 1);
  EXPECT_EQ(a.num_lost, 0) << a.lost_because;
}

TEST_F(EtcdTest, WhatWasCompactedMeanwhileIsReadAnew) {
  Watcher a(service->url(), /*quiet_ms=*/400);
  Watcher b(service->url());
  ASSERT_TRUE(a.wait([&] { return a.num_all == 1; }));
  std::int64_t revision = 0;
  for (int i = 0; i < 10; ++i) revision = b.put("other/" + std::to_string(i), "1").revision;
  ASSERT_TRUE(post("/v3/kv/compaction", "{\"revision\":\"" + std::to_string(revision) + "\"}"));
  ASSERT_TRUE(a.wait([&] { return a.num_all == 2; })) << "the next watch begins before what is left";
  EXPECT_EQ(a.num_lost, 0);
  ASSERT_TRUE(b.put("kv/x", "1").done);
  EXPECT_TRUE(a.wait([&] { return a.seen.size() == 1; }));
}

TEST_F(EtcdTest, TheNextMemberIsAskedWhereOneIsGone) {
  const std::string nobody = "http://127.0.0.1:" + std::to_string(free_port());
  Watcher a(nobody + "," + service->url());
  EXPECT_TRUE(a.wait([&] { return a.num_all == 1; }));
  EXPECT_TRUE(a.put("kv/x", "1").error) << "the first attempt goes to nobody";
  a.insist(EtcdPut{{"kv/x", "1", 0, 0}});
  EXPECT_TRUE(a.wait([&] { return a.seen.size() == 1; }));
}

TEST_F(EtcdTest, ItEndsAtOnceWhateverEtcdDoes) {
  for (const bool is_stopped : {false, true}) {
    auto a = std::make_unique<Watcher>(service->url(), 60'000, 60'000);
    ASSERT_TRUE(a->wait([&] { return a->num_all == 1; }));
    if (is_stopped) service->process().stop();
    a->etcd().ask(1, EtcdGrant{.ttl_s = 5});
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const auto begin = std::chrono::steady_clock::now();
    a.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  }
}

TEST_F(EtcdTest, TooManyRequestsAreAnsweredToo) {
  auto etcd = make_etcd({.url = parse_etcd_url(service->url()).value(), .watched_prefix = "kv/", .requests_max = 4});
  service->process().stop();
  etcd->take(100);
  for (std::uint64_t token = 1; token <= 20; ++token) etcd->ask(token, EtcdGrant{.ttl_s = 5});
  pollfd events{etcd->fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&events, 1, 0), 1) << "refusals wait for no other event";
  std::size_t num_full = 0;
  EXPECT_TRUE(wait_until([&] {
    for (const EtcdEvent& event : etcd->take(100)) {
      const auto* reply = std::get_if<EtcdReply>(&event);
      if (reply != nullptr && reply->error && reply->error->code == ErrorCode::kFull) ++num_full;
    }
    return num_full >= 15;
  })) << num_full;
}

TEST_F(EtcdTest, AUserLogsIn) {
  ASSERT_TRUE(post("/v3/auth/user/add", R"({"name":"root","password":"se:cret@1"})"));
  ASSERT_TRUE(post("/v3/auth/role/add", R"({"name":"root"})"));
  ASSERT_TRUE(post("/v3/auth/user/grant", R"({"user":"root","role":"root"})"));
  ASSERT_TRUE(post("/v3/auth/enable", "{}"));
  const std::string place = service->url().substr(7);
  Watcher a("http://root:se%3Acret%401@" + place);
  ASSERT_TRUE(a.wait([&] { return a.num_all == 1; }));
  EXPECT_TRUE(a.put("kv/x", "1").done);
  EXPECT_TRUE(a.wait([&] { return a.seen.size() == 1; }));
  service->restart();  // the new etcd closes the connections of clients that the old one had accepted
  a.insist(EtcdPut{{"kv/y", "1", 0, 0}});
  EXPECT_TRUE(a.wait([&] { return a.seen.size() == 2; }));
  Watcher b("http://root:wrong@" + place);
  ASSERT_TRUE(b.wait([&] { return b.num_lost == 1; }));
  EXPECT_THAT(b.lost_because, ::testing::Not(HasSubstr("wrong@")));
  EXPECT_TRUE(b.put("kv/x", "1").error);
}

}  // namespace
}  // namespace kvferry::controller::scale
