// Tests the state that replicas share, with a model of etcd that has random faults, and with a real etcd.
#include "controller/scale/replicated_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "controller/scale/etcd.h"
#include "tests/controller/scale/model_etcd.h"
#include "tests/controller/scale/services.h"

namespace kvferry::controller::scale {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

const NodeName kA{"", "a"};

/// A replica as in the server, but with a list of node names instead of a directory.
struct Instance {
  Instance(const std::string& name, std::uint64_t run, ReplicatedStateOptions options = {})
      : state(with(options, name, run)) {}
  static ReplicatedStateOptions with(ReplicatedStateOptions options, const std::string& name, std::uint64_t run) {
    options.name = name;
    options.endpoint = "tcp://" + name + ":1";
    options.run = run;
    return options;
  }
  /// Returns false if the node is refused.
  bool join(const NodeName& node, std::uint64_t incarnation, TimeNs now) {
    const auto newest = state.newest(node);
    if (newest && newest->value > incarnation) return false;
    if (const auto old = here.find(node); old != here.end() && old->second > incarnation) return false;
    here[node] = incarnation;
    state.joined(node, Incarnation{incarnation}, now);
    return true;
  }
  void leave(const NodeName& node, TimeNs now) {
    if (here.erase(node) > 0) state.left(node, now);
  }
  void hear_news(TimeNs now) {
    for (const SharedNews& news : state.take_news()) {
      if (const auto* fenced = std::get_if<NodeFenced>(&news)) {
        if (const auto it = here.find(fenced->node); it != here.end() && it->second < fenced->incarnation.value)
          leave(fenced->node, now);
      }
    }
  }
  std::uint64_t newest(const NodeName& node) const { return state.newest(node).value_or(Incarnation{0}).value; }
  std::vector<std::string> replicas() const {
    std::vector<std::string> names;
    for (const Replica& replica : state.replicas()) names.push_back(replica.name);
    return names;
  }
  std::map<std::string, std::string> records() const {
    std::map<std::string, std::string> values;
    for (const auto& [key, record] : state.records())
      values[record.kind + "/" + record.id] = record.owner + record.value;
    return values;
  }

  ReplicatedState state;
  std::map<NodeName, std::uint64_t> here;
};

/// The replicas r0, r1 ... with one model of etcd.
class World {
 public:
  explicit World(std::size_t num_replicas, std::uint64_t seed = 1, ReplicatedStateOptions options = {})
      : random_(seed), options_(options) {
    for (std::size_t i = 0; i < num_replicas; ++i) {
      replicas.push_back(std::make_unique<Instance>(name(i), ++last_run_, options_));
      links.push_back(std::make_unique<ModelLink>(etcd, seed * 100 + i));
    }
  }
  static std::string name(std::size_t i) { return "r" + std::to_string(i); }
  Instance& operator[](std::size_t i) { return *replicas[i]; }

  void turn(std::size_t i) {
    if (!replicas[i]) return;
    for (const EtcdEvent& event : links[i]->take(now)) replicas[i]->state.on(event, now);
    replicas[i]->hear_news(now);
    for (auto& request : replicas[i]->state.due(now)) links[i]->ask(request.token, std::move(request.request), now);
  }
  void run(std::int64_t ms, std::int64_t step_ms = 20) {
    for (const TimeNs end = now + ms * kMillisecond; now < end; now += step_ms * kMillisecond) {
      etcd.expire(now);
      for (std::size_t i = 0; i < replicas.size(); ++i) turn(i);
    }
  }
  void kill(std::size_t i) {
    replicas[i].reset();
    links[i]->drop();
  }
  void start(std::size_t i) {
    links[i]->drop();
    replicas[i] = std::make_unique<Instance>(name(i), ++last_run_, options_);
  }

  std::mt19937_64 random_;
  ReplicatedStateOptions options_;
  std::uint64_t last_run_ = 0;
  ModelEtcd etcd;
  std::vector<std::unique_ptr<Instance>> replicas;
  std::vector<std::unique_ptr<ModelLink>> links;
  TimeNs now = kSecond;
};

TEST(ReplicatedState, ReplicasFindEachOtherAndMissTheDead) {
  World world(3);
  world.run(1000);
  for (int i = 0; i < 3; ++i) EXPECT_THAT(world[i].replicas(), ElementsAre("r0", "r1", "r2"));
  EXPECT_EQ(world[0].state.replicas()[2].endpoint, "tcp://r2:1");
  EXPECT_FALSE(world[0].state.etcd_gone_since());
  world.kill(1);
  world.run(4000);
  EXPECT_THAT(world[0].replicas(), ElementsAre("r0", "r1", "r2")) << "its lease lasts";
  world.run(4000);
  EXPECT_THAT(world[0].replicas(), ElementsAre("r0", "r2"));
  world.start(1);
  world.run(1000);
  EXPECT_THAT(world[2].replicas(), ElementsAre("r0", "r1", "r2"));
  world.etcd.execute(*world[1].state.final_request(), world.now);
  world.kill(1);
  world.run(500);
  EXPECT_THAT(world[2].replicas(), ElementsAre("r0", "r2")) << "a revoked lease is noticed at once";
}

TEST(ReplicatedState, AnErasureFromBeforeTheOwnPutDropsNoIncarnation) {
  ReplicatedStateOptions options;
  options.name = "r0";
  ReplicatedState state(options);
  const std::string key = options.prefix + "nodes//a";
  state.on(EtcdAll{.pairs = {{key, "5", 3, 0}}}, kSecond);
  state.joined(kA, Incarnation{6}, kSecond);
  for (const ReplicatedState::Request& request : state.due(kSecond)) {
    const auto* put = std::get_if<EtcdPut>(&request.request);
    if (put == nullptr || put->pair.key != key) continue;
    // Another replica has erased the key, at revision 4, so this put fails and the next one succeeds.
    EtcdReply reply{.token = request.token};
    reply.done = false;
    reply.revision = 4;
    state.on(reply, kSecond);
  }
  for (const ReplicatedState::Request& request : state.due(2 * kSecond)) {
    const auto* put = std::get_if<EtcdPut>(&request.request);
    if (put == nullptr || put->pair.key != key) continue;
    EtcdReply reply{.token = request.token};
    reply.done = true;
    reply.revision = 5;
    state.on(reply, 2 * kSecond);
  }
  state.left(kA, 3 * kSecond);
  state.on(EtcdChanges{{EtcdErased{key, 4}}}, 3 * kSecond);  // the watch is late
  EXPECT_EQ(state.newest(kA), Incarnation{6}) << "the put at revision 5 is newer than the erasure";
  state.on(EtcdChanges{{EtcdErased{key, 6}}}, 3 * kSecond);
  EXPECT_FALSE(state.newest(kA));
}

TEST(ReplicatedState, AnOlderIncarnationIsFencedWhereTheNewerWasNeverSeen) {
  World world(3);
  ASSERT_TRUE(world[0].join(kA, 5, world.now));
  ASSERT_TRUE(world[1].join(kA, 5, world.now));
  world.run(1000);
  EXPECT_EQ(world[2].newest(kA), 5U);
  ASSERT_TRUE(world[2].join(kA, 6, world.now));
  world.run(500);
  EXPECT_THAT(world[0].here, IsEmpty());
  EXPECT_THAT(world[1].here, IsEmpty());
  EXPECT_FALSE(world[0].join(kA, 5, world.now));
  EXPECT_TRUE(world[0].join(kA, 6, world.now));
  world.start(1);
  world.run(1000);
  EXPECT_FALSE(world[1].join(kA, 5, world.now)) << "a replica that began later";
}

TEST(ReplicatedState, WithoutEtcdAllGoesOnAndWhatIsOwedIsWrittenWhenItIsBack) {
  World world(2);
  world.run(1000);
  world.etcd.set_up(false);
  world.run(30'000);
  ASSERT_TRUE(world[0].state.etcd_gone_since());
  EXPECT_GT(world.now - *world[0].state.etcd_gone_since(), 25 * kSecond);
  EXPECT_NE(world[0].state.etcd_error(), "");
  EXPECT_THAT(world[0].replicas(), ElementsAre("r0", "r1")) << "as it was when etcd went";
  EXPECT_TRUE(world[0].join(kA, 5, world.now));
  EXPECT_TRUE(world[1].join(kA, 4, world.now)) << "nobody told it";
  world.run(10'000);
  EXPECT_GT(world[0].state.num_dirty(), 0U);
  world.etcd.set_up(true);
  world.run(5000);
  EXPECT_FALSE(world[0].state.etcd_gone_since());
  EXPECT_THAT(world[1].here, IsEmpty());
  EXPECT_EQ(world[1].newest(kA), 5U);
  EXPECT_THAT(world[1].replicas(), ElementsAre("r0", "r1"));
  EXPECT_EQ(world[0].state.num_dirty(), 0U);
}

TEST(ReplicatedState, AnEmptiedEtcdIsToldAllAgain) {
  World world(2);
  world[0].join(kA, 5, world.now);
  world[0].join({"other", "x/y%z"}, 7, world.now);
  world.run(1000);
  world[0].leave(kA, world.now);
  ASSERT_TRUE(world[1].state.set({"pins", "p", "me", "v", 0, world.now + 60 * kSecond}, world.now));
  world.run(500);
  world.etcd.wipe();
  world.run(5000);
  world.start(0);
  world.run(2000);
  EXPECT_EQ(world[0].newest(kA), 5U);
  EXPECT_EQ(world[0].newest({"other", "x/y%z"}), 7U);
  EXPECT_THAT(world[0].replicas(), ElementsAre("r0", "r1"));
  EXPECT_THAT(world[0].records(), UnorderedElementsAre(std::pair<std::string, std::string>("pins/p", "mev")));
}

TEST(ReplicatedState, ReplicaThatSleptThroughItsLeaseTakesANewOne) {
  World world(2);
  world.run(1000);
  for (TimeNs end = world.now + 20 * kSecond; world.now < end; world.now += 50 * kMillisecond) {
    world.etcd.expire(world.now);
    world.turn(0);
  }
  EXPECT_THAT(world[0].replicas(), ElementsAre("r0"));
  world.run(2000);
  EXPECT_THAT(world[0].replicas(), ElementsAre("r0", "r1"));
}

TEST(ReplicatedState, OfTwoWithOneNameTheLaterHasIt) {
  World world(1);
  world.run(500);
  Instance twin("r0", 1000);
  ModelLink link(world.etcd, 99);
  for (int i = 0; i < 200; ++i) {
    world.run(20);
    for (const EtcdEvent& event : link.take(world.now)) twin.state.on(event, world.now);
    for (auto& request : twin.state.due(world.now)) link.ask(request.token, std::move(request.request), world.now);
  }
  EXPECT_TRUE(world[0].state.is_name_taken());
  EXPECT_FALSE(twin.state.is_name_taken());
  const std::int64_t revision = world.etcd.revision();
  world.run(2000);
  EXPECT_EQ(world.etcd.revision(), revision) << "they don't write against each other";
  world.run(10'000);
  EXPECT_FALSE(world[0].state.is_name_taken()) << "the later one is gone";
}

TEST(ReplicatedState, DeadNodesAreDroppedInTheEnd) {
  World world(2, 1, {.keep_ms = 10'000});
  world[0].join(kA, 5, world.now);
  world[1].join({"", "b"}, 5, world.now);
  world.run(15'000);
  EXPECT_EQ(world[1].newest(kA), 5U) << "alive at the other";
  EXPECT_EQ(world.etcd.num_keys(), 4U);
  world[0].leave(kA, world.now);
  world.run(5000);
  EXPECT_EQ(world[0].newest(kA), 5U);
  world.run(15'000);
  EXPECT_FALSE(world[0].state.newest(kA));
  EXPECT_FALSE(world[1].state.newest(kA));
  EXPECT_EQ(world.etcd.num_keys(), 3U);
  EXPECT_EQ(world[0].newest({"", "b"}), 5U);
}

TEST(ReplicatedState, MemoryOfNodesIsBounded) {
  World world(2, 1, {.nodes_max = 50});
  for (int i = 0; i < 500; ++i) {
    const NodeName node{"", "n" + std::to_string(i)};
    world[0].join(node, 1, world.now);
    world[0].leave(node, world.now);
    world.run(20);
  }
  world.run(10'000);
  EXPECT_LE(world[0].state.num_nodes(), 50U);
  EXPECT_LE(world[1].state.num_nodes(), 50U);
}

TEST(ReplicatedState, RecordsAreSharedReplacedAndEndAtTheirDeadline) {
  World world(3);
  ASSERT_TRUE(world[0].state.set({"drains", "n1", "admin", "soon", 0, world.now + 60 * kSecond}, world.now));
  ASSERT_TRUE(world[0].state.set({"pins", "k", "a", "1", 0, world.now + 5 * kSecond}, world.now));
  world.run(1000);
  EXPECT_THAT(world[2].records(), UnorderedElementsAre(std::pair<std::string, std::string>("drains/n1", "adminsoon"),
                                                       std::pair<std::string, std::string>("pins/k", "a1")));
  ASSERT_TRUE(world[1].state.set({"drains", "n1", "admin2", "now", 0, world.now + 60 * kSecond}, world.now));
  world.run(1000);
  EXPECT_EQ(world[0].records()["drains/n1"], "admin2now");
  world.run(6000);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(world[i].records().size(), 1U) << i;
  EXPECT_EQ(world.etcd.num_keys(), 4U);
  EXPECT_FALSE(world[0].state.set({"a/b", "k", "a", "1", 0, world.now + kSecond}, world.now));
  EXPECT_FALSE(world[0].state.set({"pins", "k", "a", "1", 0, world.now}, world.now));
}

TEST(ReplicatedState, ARecordWhoseDeadlinePassesWithoutEtcdEndsAllTheSame) {
  World world(2);
  ASSERT_TRUE(world[0].state.set({"pins", "k", "a", "1", 0, world.now + 5 * kSecond}, world.now));
  world.run(1000);
  world.etcd.set_up(false);
  world.run(6000);
  for (int i = 0; i < 2; ++i) EXPECT_THAT(world[i].records(), IsEmpty()) << i;
  world.etcd.set_up(true);
  world.run(5000);
  for (int i = 0; i < 2; ++i) EXPECT_THAT(world[i].records(), IsEmpty()) << i;
}

/// Runs a schedule with all kinds of faults. In the end all replicas must agree on the true state.
void random_schedule(std::uint64_t seed) {
  World world(3, seed, {.keep_ms = 3'600'000});
  std::mt19937_64& random = world.random_;
  const auto dice = [&](std::uint64_t n) { return random() % n; };
  // incarnations that a living replica has accepted: no replica may accept an older one for good
  std::map<NodeName, std::uint64_t> promised;
  for (int step = 0; step < 300; ++step) {
    world.run(static_cast<std::int64_t>(dice(8)) * 20);
    const std::size_t i = dice(3);
    const NodeName node{"", "n" + std::to_string(dice(4))};
    for (const auto& replica : world.replicas) {
      if (!replica) continue;
      for (const auto& [name, incarnation] : replica->here) ASSERT_GE(incarnation, replica->newest(name)) << seed;
    }
    switch (dice(16)) {
      case 0:
        world.kill(i);
        break;
      case 1:
        world.etcd.set_up(false);
        break;
      case 2:
        world.etcd.wipe();
        break;
      case 3:
        world.links[i]->set_up(false);
        break;
      case 4:
        world.run(static_cast<std::int64_t>(dice(100)) * 100, 50);
        break;
      case 5:
        world.etcd.compact();
        break;
      case 6:
        if (world.replicas[i]) {
          ASSERT_TRUE(world[i].state.set({"pins", "p" + std::to_string(dice(3)), World::name(i), std::to_string(step),
                                          0, world.now + static_cast<TimeNs>(dice(200) + 1) * kSecond},
                                         world.now));
        }
        break;
      case 7:
      case 8:
      case 9:
        world.etcd.set_up(true);
        break;
      case 10:
        world.links[i]->set_up(true);
        break;
      case 11:
        if (world.replicas[i]) world[i].leave(node, world.now);
        break;
      default:
        if (!world.replicas[i]) world.start(i);
        world[i].join(node, 1 + dice(1000) + static_cast<std::uint64_t>(step), world.now);
    }
  }
  world.etcd.set_up(true);
  for (std::size_t i = 0; i < 3; ++i) {
    if (!world.replicas[i]) world.start(i);
    world.links[i]->set_up(true);
  }
  for (const auto& replica : world.replicas) {
    for (const auto& [name, incarnation] : replica->here) promised[name] = std::max(promised[name], incarnation);
  }
  world.run(10'000);
  for (std::size_t i = 0; i < 3; ++i) {
    Instance& replica = world[i];
    ASSERT_THAT(replica.replicas(), ElementsAre("r0", "r1", "r2")) << seed;
    ASSERT_EQ(replica.records(), world[0].records()) << seed;
    ASSERT_EQ(replica.state.num_dirty(), 0U) << seed;
    ASSERT_FALSE(replica.state.etcd_gone_since()) << seed;
    for (const auto& [name, incarnation] : promised) {
      ASSERT_GE(replica.newest(name), incarnation) << seed;
      ASSERT_EQ(replica.newest(name), world[0].newest(name)) << seed;
    }
    for (const auto& [name, incarnation] : replica.here) ASSERT_EQ(incarnation, world[0].newest(name)) << seed;
  }
  world.run(250'000, 100);
  ASSERT_THAT(world[0].records(), IsEmpty()) << seed;
  for (std::size_t i = 0; i < 3; ++i) ASSERT_THAT(world[i].records(), IsEmpty()) << seed;
}

TEST(ReplicatedState, ReplicasAgreeAfterRandomFaults) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    random_schedule(seed);
    if (HasFatalFailure()) return;
  }
}

TEST(ReplicatedState, ReplicasAgreeOnARealEtcdThatIsKilledStoppedAndEmptied) {
  if (!EtcdService::is_here()) GTEST_SKIP() << "etcd is not installed (Debian's etcd-server)";
  EtcdService service;
  const SteadyClock clock;
  std::vector<std::unique_ptr<Instance>> replicas;
  std::vector<std::unique_ptr<Etcd>> clients;
  for (int i = 0; i < 3; ++i) {
    replicas.push_back(std::make_unique<Instance>("r" + std::to_string(i), 1, ReplicatedStateOptions{.lease_s = 2}));
    clients.push_back(make_etcd({.url = parse_etcd_url(service.url()).value(),
                                 .watched_prefix = "kvferry/",
                                 .request_ms = 1000,
                                 .quiet_ms = 500,
                                 .retry_ms_max = 300}));
  }
  const auto wait = [&](const std::function<bool()>& reached) {
    return wait_until([&] {
      for (std::size_t i = 0; i < replicas.size(); ++i) {
        const TimeNs now = clock.now();
        for (const EtcdEvent& event : clients[i]->take(100)) replicas[i]->state.on(event, now);
        replicas[i]->hear_news(now);
        for (auto& request : replicas[i]->state.due(now)) clients[i]->ask(request.token, std::move(request.request));
      }
      return reached();
    });
  };
  const auto agree = [&](std::uint64_t incarnation) {
    return wait([&] {
      return std::ranges::all_of(replicas, [&](const auto& replica) {
        return replica->newest(kA) == incarnation && replica->replicas().size() == 3 &&
               replica->records().size() == 1 && replica->state.num_dirty() == 0 && !replica->state.etcd_gone_since();
      });
    });
  };
  const auto all_lost = [&] {
    return wait([&] {
      return std::ranges::all_of(replicas, [](const auto& r) { return r->state.etcd_gone_since().has_value(); });
    });
  };
  ASSERT_TRUE(replicas[0]->state.set({"pins", "k", "a", "1", 0, clock.now() + 300 * kSecond}, clock.now()));
  replicas[0]->join(kA, 1, clock.now());
  ASSERT_TRUE(agree(1));
  service.process().kill();
  ASSERT_TRUE(all_lost());
  replicas[1]->join(kA, 2, clock.now());
  service.process().start();
  ASSERT_TRUE(agree(2));
  EXPECT_THAT(replicas[0]->here, IsEmpty()) << "fenced by what another replica saw";
  service.process().stop();
  ASSERT_TRUE(all_lost());
  replicas[2]->join(kA, 3, clock.now());
  std::this_thread::sleep_for(std::chrono::seconds(3));  // longer than the leases
  service.process().go_on();
  ASSERT_TRUE(agree(3));
  service.restart_empty();
  replicas[0]->join(kA, 4, clock.now());
  ASSERT_TRUE(agree(4));
}

}  // namespace
}  // namespace kvferry::controller::scale
