// Tests the sessions of nodes and of a controller, with a network between them that loses, doubles, delays and changes
// messages. A seed, which a failure prints, decides the schedule. A checker knows what each node held after each of its
// messages, and compares.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "controller/client/client_session.h"
#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "tests/controller/fixtures.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr TimeNs kTick = 25 * kMillisecond;
constexpr TimeNs kBeat = 500 * kMillisecond;
constexpr TimeNs kDelayMax = 150 * kMillisecond;
constexpr int kBeatsToHeal = 4;
constexpr std::uint32_t kKeysOfNode = 16;
constexpr std::uint32_t kNumNodes = 3;

using State = std::array<std::uint8_t, kKeysOfNode>;  // for each key, a bit for each tier that has the key

struct Dice {
  std::mt19937_64 random;
  std::uint32_t draw(std::uint32_t end) { return static_cast<std::uint32_t>(random() % end); }
  bool percent(std::uint32_t chance) { return draw(100) < chance; }
};

/// One direction of the connection between a node and the controller. A message belongs to the connection on which it
/// was sent.
class Line {
 public:
  struct Letter {
    ConnectionId connection;
    std::string bytes;
  };
  void send(Dice& dice, bool is_faulty, TimeNs now, ConnectionId connection, std::string_view bytes) {
    if (is_faulty && dice.percent(15)) return;
    for (int copies = is_faulty && dice.percent(10) ? 2 : 1; copies > 0; --copies) {
      const TimeNs delay = is_faulty && dice.percent(30) ? dice.draw(kDelayMax / kMillisecond) * kMillisecond : 0;
      waiting_.emplace(now + delay, Letter{connection, std::string(bytes)});
    }
  }
  /// Returns nullopt if no message is due.
  std::optional<Letter> receive(TimeNs now) {
    if (waiting_.empty() || waiting_.begin()->first > now) return std::nullopt;
    Letter letter = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    return letter;
  }
  /// Messages that were sent on `from` arrive on `to`. All other messages are lost.
  void move(ConnectionId from, ConnectionId to) {
    std::erase_if(waiting_, [&](const auto& entry) { return entry.second.connection != from; });
    for (auto& [arrival, letter] : waiting_) letter.connection = to;
  }

 private:
  // by time of arrival; messages with equal times in the order in which they were sent
  std::multimap<TimeNs, Letter> waiting_;
};

/// A node's state as in node_links.cpp, and the node's session, which uses two lines.
struct Node {
  std::string name;
  bool is_running = false;
  std::uint64_t incarnation = 0;
  State held{};
  // by incarnation, then by sequence number: what the node held when this was its next sequence number
  std::map<std::uint64_t, std::vector<State>> told;
  std::unique_ptr<ClientSession> session;
  TimeNs stopped_at = 0;
  ConnectionId connection;
  NodeId id;  // the last node id of the node's connection
  Line up, down;

  void note() { told[incarnation].resize(session->publisher().next_sequence() + 1, held); }
  void publish(std::uint32_t tier, const std::vector<std::uint32_t>& keys) {
    std::vector<ChunkEntry> chunks;
    for (const std::uint32_t key : keys) {
      held[key] = static_cast<std::uint8_t>(held[key] | 1U << tier);
      chunks.push_back({key_of(key), 256, false, {}});
    }
    session->publish(chunks, static_cast<Tier>(tier));
    note();
  }
  void evict(const std::vector<std::uint32_t>& keys) {
    std::vector<ChunkKey> evicted;
    for (const std::uint32_t key : keys) {
      held[key] = 0;
      evicted.push_back(key_of(key));
    }
    session->evict(evicted);
    note();
  }
  void publish_all() {
    for (std::uint32_t tier = 0; tier < kNumTiers; ++tier) {
      std::vector<std::uint32_t> keys;
      for (std::uint32_t key = 0; key < kKeysOfNode; ++key) {
        if ((held[key] >> tier & 1U) != 0) keys.push_back(key);
      }
      publish(tier, keys);
    }
    session->end_snapshot();
    note();
  }
};

class Cluster final : private ReplySender {
 public:
  explicit Cluster(unsigned seed) : seed_(seed), dice_{std::mt19937_64(seed)} {
    for (std::uint32_t i = 0; i < kNumNodes; ++i) nodes_[i].name = fmt::format("engine{}", i);
    restart_controller();
  }

  void run() {
    for (int round = 0; round < 3 && !testing::Test::HasFatalFailure(); ++round) {
      is_faulty_ = true;
      for (const TimeNs end = now_ + 6 * kSecond; now_ < end && !testing::Test::HasFatalFailure();) step();
      is_faulty_ = false;
      for (Node& node : nodes_) {
        if (!node.is_running && dice_.percent(50)) start(node);
      }
      const TimeNs mended_at = std::max(now_, stalled_until_);
      while (!all_found() && !testing::Test::HasFatalFailure()) {
        step();
        ASSERT_LE(now_, mended_at + kBeatsToHeal * kBeat) << "not healed, seed " << seed_;
      }
      num_healed_ += 1;
      // From here on there are no faults, and dead nodes have been removed.
      for (const TimeNs end = now_ + 5 * kSecond; now_ < end && !testing::Test::HasFatalFailure();) step();
      const std::uint64_t num_wishes = num_resends_ + num_snapshots_;
      for (const TimeNs end = now_ + 2 * kSecond; now_ < end && !testing::Test::HasFatalFailure();) step();
      ASSERT_EQ(num_resends_ + num_snapshots_, num_wishes) << "still asking, seed " << seed_;
      ASSERT_TRUE(all_found()) << "seed " << seed_;
      // cleared only now, because lookups don't show differences of slower tiers, which only digests repair
      changed_.clear();
    }
  }

  std::uint64_t num_healed_ = 0, num_resends_ = 0, num_snapshots_ = 0, num_differed_ = 0, num_fenced_ = 0,
                num_exact_ = 0, num_compared_ = 0, num_excused_ = 0;

 private:
  struct Credit {
    std::uint64_t incarnation = 0;
    bool is_confirmed = true;
    State fastest{};  // for each key, the bit of the fastest tier that has the key
  };

  void restart_controller() {
    if (sessions_) {
      num_differed_ += sessions_->directory().num_digests_differed();
      num_fenced_ += sessions_->counters().nodes_fenced;
    }
    sessions_ = std::make_unique<Sessions>(DirectoryOptions{.index = {.seed = seed_}}, now_);
    for (Node& node : nodes_) {
      const ConnectionId connection = sessions_->open();
      node.up.move(std::exchange(node.connection, connection), connection);
    }
    asker_ = sessions_->directory().join(node_info("asker"), 0, now_)->id;
  }
  void start(Node& node) {
    node.is_running = true;
    ++node.incarnation;
    node.held = State{};
    node.connection = sessions_->open();  // messages of the older incarnation arrive on a connection of their own
    node.down = Line();
    const std::size_t resend_bytes_max = dice_.percent(50) ? 400 : 100'000;
    node.session = std::make_unique<ClientSession>(
        ClientOptions{.node = node_info(node.name, node.incarnation)},
        [this, &node](std::string_view bytes) {
          node.up.send(dice_, is_faulty_, now_, node.connection, bytes);
          return true;
        },
        resend_bytes_max);
    node.note();
  }
  void stop(Node& node) {
    node.is_running = false;
    node.stopped_at = now_;
  }

  void step() {
    now_ += kTick;
    if (is_faulty_ && dice_.percent(1) && dice_.percent(15)) restart_controller();
    if (is_faulty_ && dice_.percent(1) && dice_.percent(50)) stalled_until_ = now_ + dice_.draw(5000) * kMillisecond;
    for (Node& node : nodes_) {
      if (is_faulty_) disturb(node);
      if (node.is_running) turn(node);
    }
    if (now_ < stalled_until_) return;
    for (Node& node : nodes_) {
      while (const auto letter = node.up.receive(now_)) serve(node, letter->connection, letter->bytes);
    }
    sessions_->directory().heartbeat(asker_, 0, now_);
    sessions_->expire(now_);
    ASSERT_TRUE(sessions_->directory().lookup(asker_, {}, now_)) << "a late loop is nobody's silence, seed " << seed_;
    check();
  }

  void disturb(Node& node) {
    if (!node.is_running) {
      if (dice_.percent(2)) start(node);
      return;
    }
    if (dice_.percent(1)) return dice_.percent(50) ? stop(node) : start(node);
    if (!dice_.percent(30)) return;
    std::vector<std::uint32_t> keys;
    for (std::uint32_t i = 1 + dice_.draw(4); i > 0; --i) keys.push_back(dice_.draw(kKeysOfNode));
    if (dice_.percent(60))
      node.publish(dice_.draw(kNumTiers), keys);
    else
      node.evict(keys);
  }

  void turn(Node& node) {
    std::vector<ClientEvent> events;
    while (const auto letter = node.down.receive(now_)) node.session->receive(letter->bytes, events);
    node.session->check_silence(now_, events);
    for (const ClientEvent& event : events) {
      ASSERT_FALSE(std::holds_alternative<Refused>(event)) << "seed " << seed_;
      if (!std::holds_alternative<SnapshotWanted>(event)) continue;
      node.note();
      node.publish_all();
    }
    node.session->send_due(now_);
  }

  void serve(Node& node, ConnectionId connection, std::string bytes) {
    if (is_faulty_ && dice_.percent(1)) {
      sessions_->disconnected(node.connection);
      node.connection = sessions_->open();
    }
    if (is_faulty_ && dice_.percent(3)) change(connection, bytes);
    sessions_->receive(connection, bytes, now_, *this);
    // If the Hello of an older incarnation arrives late, the newer one is already registered. So the session is always
    // that of the newest incarnation.
    if (const Sessions::Session* session = sessions_->session(connection)) node.id = session->node;
    ASSERT_EQ(sessions_->counters().messages_malformed, 0U) << "seed " << seed_;
  }
  /// Changes a message. Neither the node nor the controller can notice this, except by digests.
  void change(ConnectionId connection, std::string& bytes) {
    const Sessions::Session* session = sessions_->session(connection);
    if (session == nullptr) return;
    const auto change_first = [&](std::vector<ChunkKey>& keys) {
      const std::uint32_t other = dice_.draw(kKeysOfNode);
      for (std::uint32_t key = 0; key < kKeysOfNode; ++key)
        if (key == other || key_of(key) == keys[0]) changed_[session->node].set(key);
      keys[0] = key_of(other);
    };
    wire::FromNode message = wire::parse<wire::FromNode>(bytes).value();
    if (auto* publish = std::get_if<wire::Publish>(&message); publish != nullptr && !publish->full.keys.empty()) {
      change_first(publish->full.keys);
      bytes = encode(*publish);
    } else if (auto* evict = std::get_if<wire::Evict>(&message)) {
      change_first(evict->keys.keys);
      bytes = encode(*evict);
    }
  }
  bool send(ConnectionId to, std::string_view bytes) override {
    const auto node = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node& n) { return n.connection == to; });
    if (node == nodes_.end()) return false;
    const wire::FromController message = wire::parse<wire::FromController>(bytes).value();
    if (const auto* registered = std::get_if<wire::Registered>(&message))
      num_snapshots_ += registered->snapshot_wanted ? 1 : 0;
    if (const auto* wanted = std::get_if<wire::SnapshotWanted>(&message))
      ++(wanted->resend_will_do ? num_resends_ : num_snapshots_);
    node->down.send(dice_, is_faulty_, now_, to, bytes);
    return true;
  }

  /// Looks up each key alone, so that a missing key does not hide the keys after it.
  std::map<std::string, Credit> credits() {
    std::map<std::string, Credit> credits;
    for (std::uint32_t key = 0; key < kKeysOfNode; ++key) {
      const auto holders =
          sessions_->directory().lookup(asker_, {.keys = {key_of(key)}, .tail_groups = {}, .exact_tails = {}}, now_);
      for (const Holder& holder : *holders) {
        Credit& credit = credits[holder.engine_id.value];
        credit.incarnation = holder.incarnation.value;
        credit.is_confirmed = holder.confirmed;
        credit.fastest[key] = static_cast<std::uint8_t>(1U << static_cast<unsigned>(holder.tier));
      }
    }
    return credits;
  }
  static State fastest_of(const State& state) {
    State fastest{};
    for (std::uint32_t key = 0; key < kKeysOfNode; ++key)
      fastest[key] = static_cast<std::uint8_t>(state[key] & -state[key]);
    return fastest;
  }

  void check() {
    std::map<std::string, std::uint64_t> registered;
    for (const NodeStatus& node : sessions_->directory().status(now_))
      registered[node.engine_id.value] = node.incarnation.value;
    for (const auto& [name, credit] : credits()) {
      Node& node = nodes_[name.back() - '0'];
      ASSERT_TRUE(registered.contains(name)) << name << " is credited, and nobody is registered, seed " << seed_;
      ASSERT_EQ(credit.incarnation, registered[name]) << "stale credit of " << name << ", seed " << seed_;
      const NodeId id = node.id;
      // Excludes the keys that a changed message named or should have named. Only digests show what the directory has
      // of these keys, and this test can't know which repair corrected them.
      const auto found = changed_.find(id);
      const std::bitset<kKeysOfNode> changed = found == changed_.end() ? std::bitset<kKeysOfNode>() : found->second;
      const std::vector<State>& told = node.told.at(credit.incarnation);
      const std::uint64_t sequence = sessions_->directory().repair(id).resend_from;
      if (credit.is_confirmed) {
        ASSERT_LT(sequence, told.size());
        ++num_exact_;
      }
      for (std::uint32_t key = 0; key < kKeysOfNode; ++key) {
        ++(changed[key] ? num_excused_ : num_compared_);
        if (changed[key]) continue;
        const std::uint8_t tier = credit.fastest[key];
        if (credit.is_confirmed) {
          ASSERT_EQ(tier, fastest_of(told[sequence])[key])
              << "key " << key << " of " << name << " at " << sequence << ", seed " << seed_;
        }
        ASSERT_TRUE(tier == 0 || std::any_of(told.begin(), told.end(), [&](const State& s) { return s[key] & tier; }))
            << name << " never had key " << key << ", seed " << seed_;
      }
    }
  }

  /// Returns true if the directory has everything that living nodes hold, confirmed, and nothing of nodes that died
  /// longer ago than a lease and the grace time of a late loop.
  bool all_found() {
    std::map<std::string, Credit> credits = this->credits();
    for (Node& node : nodes_) {
      const auto found = credits.find(node.name);
      if (!node.is_running) {
        const TimeNs silent_since = std::max(node.stopped_at + kDelayMax, stalled_until_);
        if (found != credits.end() && now_ > silent_since + 4 * kSecond + 2 * kTick) return false;
        continue;
      }
      const State expected = fastest_of(node.held);
      const Sessions::Session* session = sessions_->session(node.connection);
      const bool speaks = session != nullptr && session->incarnation.value == node.incarnation;
      if (found == credits.end() && expected == State{} && speaks) continue;
      if (found == credits.end() || found->second.incarnation != node.incarnation || !found->second.is_confirmed ||
          found->second.fastest != expected)
        return false;
    }
    return true;
  }

  unsigned seed_;
  Dice dice_;
  TimeNs now_ = kSecond;
  bool is_faulty_ = false;
  TimeNs stalled_until_ = 0;
  std::array<Node, kNumNodes> nodes_;
  std::unique_ptr<Sessions> sessions_;
  // keys for which the directory received something else than the node sent
  std::map<NodeId, std::bitset<kKeysOfNode>> changed_;
  NodeId asker_;
};

TEST(Repair, AnyScheduleOfFaultsHealsAndNothingStaleIsCredited) {
  log().set_level(spdlog::level::err);  // no warnings, because thousands of nodes join and leave
  std::uint64_t num_resends = 0, num_snapshots = 0, num_differed = 0, num_fenced = 0, num_exact = 0, num_compared = 0,
                num_excused = 0;
  const auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? 0U : static_cast<unsigned>(std::strtoul(text, nullptr, 10));
  };
  const unsigned only = number("KVFERRY_SEED");
  const unsigned last = only > 0 ? only : number("KVFERRY_SEEDS") > 0 ? number("KVFERRY_SEEDS") : 200;
  for (unsigned seed = std::max(only, 1U); seed <= last; ++seed) {
    Cluster cluster(seed);
    cluster.run();
    if (HasFatalFailure()) return;
    ASSERT_EQ(cluster.num_healed_, 3U);
    num_resends += cluster.num_resends_;
    num_snapshots += cluster.num_snapshots_;
    num_differed += cluster.num_differed_;
    num_fenced += cluster.num_fenced_;
    num_exact += cluster.num_exact_;
    num_compared += cluster.num_compared_;
    num_excused += cluster.num_excused_;
  }
  if (only > 0) return;
  // Checks that the schedules contained all kinds of faults.
  EXPECT_GT(num_resends, 1000U);
  EXPECT_GT(num_snapshots, 1000U);
  EXPECT_GT(num_differed, 20U);
  EXPECT_GT(num_fenced, 100U);
  EXPECT_GT(num_exact, 10'000U);
  EXPECT_GT(num_excused, 0U);
  EXPECT_LT(num_excused, num_compared / 5) << num_compared << " compared: a changed message excuses too many keys";
}

}  // namespace
}  // namespace kvferry::controller
