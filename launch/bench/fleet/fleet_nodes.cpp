#include "launch/bench/fleet/fleet_nodes.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "launch/bench/harness/failure.h"

namespace kvferry::bench {
namespace {

using controller::Client;

// Each node's Client::process() is called at least this often, so that a heartbeat follows publish() and evict() within
// 150 ms (controller/api/client.h).
constexpr std::uint64_t kBeatMs = 50;
constexpr std::uint64_t kLateMs = 5;
constexpr std::int64_t kLookupTimeoutMs = 1000;
constexpr TimeNs kSlow = 50 * kMillisecond;

}  // namespace

struct Fleet::Node {
  std::unique_ptr<Client> client;  // the node's client; nullptr after leave()
  HeldConversations held;
  std::uint64_t incarnation = 0;
  bool is_silent = false, is_registered = false, is_published = false;
  std::uint64_t published_below = 0;  // sequence number that follows the node's snapshot
  double stores_due = 0, lookups_due = 0;
  std::vector<Asked> asked;
  std::optional<TimeNs> seen_gone;
};

Fleet::Fleet(std::vector<std::string> controllers, const FleetLoad& load)
    : controllers_(std::move(controllers)),
      load_(load),
      zmq_context_(std::make_shared<net::ZmqContext>(static_cast<int>(load.num_nodes * controllers_.size() * 2 + 16))),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      started_at_(clock_.now()) {
  for (std::uint32_t node = 0; node < load.num_nodes; ++node) {
    nodes_.push_back({.client = nullptr, .held = {node, load.conversations_per_node}, .asked = {}, .seen_gone = {}});
    nodes_.back().stores_due = static_cast<double>(random_() % 1000) * 1e-3;
    nodes_.back().lookups_due = static_cast<double>(random_() % 1000) * 1e-3;
  }
  for (std::uint32_t node = 0; node < load.num_nodes; ++node) join(node);
}

Fleet::~Fleet() = default;

std::unique_ptr<Client> Fleet::make_client(std::uint32_t node) {
  controller::ClientOptions options{
      .controller = {},
      .node = {EngineId{fmt::format("node{}", node)}, Incarnation{nodes_[node].incarnation}, "kv_both",
               fmt::format("tcp://10.{}.{}.{}:14700", node >> 16, node >> 8 & 255, node & 255), "",
               "fleet bf16 layers=32 heads=8 head_size=128 chunk_tokens=256"},
      .lookup_timeout_ms = kLookupTimeoutMs};
  std::vector<std::unique_ptr<Client>> clients;
  for (std::size_t i = 0; i < controllers_.size(); ++i) {
    options.controller = controllers_[(node + i) % controllers_.size()];
    clients.push_back(controller::make_client_over(
        need(controller::make_link(options.controller, {.zmq_context = zmq_context_})), options));
  }
  return need(controller::make_replica_client(std::move(clients), options));
}

void Fleet::join(std::uint32_t index) {
  Node& node = nodes_[index];
  node.client.reset();
  ++node.incarnation;
  Result<std::unique_ptr<Client>> client = attempt([&] { return make_client(index); });
  if (!client) throw Failure(std::move(client).error().with(fmt::format("node {} of {}", index + 1, nodes_.size())));
  node.client = *std::move(client);
  node.is_silent = node.is_registered = node.is_published = false;
  node.asked.clear();
  epoll_event event{.events = EPOLLIN, .data = {.u32 = index}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, node.client->fd(), &event) != 0)
    throw Failure(
        {ErrorCode::kUnavailable, fmt::format("can't wait for the connection of node {} of {}: {}; give fewer --nodes",
                                              index + 1, nodes_.size(), std::strerror(errno))});
}

void Fleet::leave(std::uint32_t index) {
  Node& node = nodes_[index];
  node.client->leave();
  node.client.reset();
  node.is_registered = node.is_published = false;
  node.asked.clear();
}

void Fleet::fall_silent(std::uint32_t index) {
  Node& node = nodes_[index];
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, node.client->fd(), nullptr);
  node.is_silent = true;
  node.is_registered = node.is_published = false;
  node.seen_gone.reset();
  node.asked.clear();
}

void Fleet::expect_all_again() {
  for (Node& node : nodes_) node.is_registered = node.is_published = false;
}

void Fleet::turn() {
  const std::uint64_t ticks = static_cast<std::uint64_t>((clock_.now() - started_at_) / kMillisecond);
  if (ticks > num_ticks_ + kLateMs) num_late_ticks_ += ticks - num_ticks_ - kLateMs;
  num_ticks_ =
      std::max(num_ticks_, ticks - std::min(ticks, kBeatMs));  // work that is overdue by more than kBeatMs is dropped
  for (; num_ticks_ < ticks; ++num_ticks_) {
    for (std::size_t node = num_ticks_ % kBeatMs; node < nodes_.size(); node += kBeatMs)
      beat(static_cast<std::uint32_t>(node), clock_.now());
  }
  std::array<epoll_event, 256> events;
  const int num_events = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 1);
  for (int i = 0; i < num_events; ++i) process(events[static_cast<std::size_t>(i)].data.u32);
}

void Fleet::beat(std::uint32_t index, TimeNs now) {
  Node& node = nodes_[index];
  if (node.client == nullptr || node.is_silent) return;
  process(index);
  if (!has_traffic_ || !is_up(index)) return;
  constexpr double kBeatS = static_cast<double>(kBeatMs) * 1e-3;
  for (node.stores_due += load_.stores_per_s * kBeatS; node.stores_due >= 1; node.stores_due -= 1) {
    node.client->evict({node.held.evict()});
    node.client->publish({node.held.store()});
  }
  for (node.lookups_due += load_.lookups_per_s * kBeatS; node.lookups_due >= 1; node.lookups_due -= 1) {
    const auto holder = static_cast<std::uint32_t>(random_() % nodes_.size());
    if (holder != index && is_up(holder)) ask(index, holder, false, now);
  }
}

void Fleet::ask(std::uint32_t asker, std::uint32_t holder, bool is_probe, TimeNs now) {
  const HeldConversations& held = nodes_[holder].held;
  (is_probe ? held.lonely() : held.whole(random_())).keys(query_.keys);
  const Result<std::uint64_t> token = nodes_[asker].client->lookup(query_);
  if (token)
    nodes_[asker].asked.push_back({*token, now, holder, is_probe});
  else
    ++times_.num_failed;
}

void Fleet::probe(std::uint32_t node) {
  std::uint32_t asker = node;
  while (asker == node || nodes_[asker].client == nullptr || nodes_[asker].is_silent)
    asker = static_cast<std::uint32_t>(random_() % nodes_.size());
  ask(asker, node, true, clock_.now());
}

void Fleet::process(std::uint32_t index) {
  Node& node = nodes_[index];
  if (node.client == nullptr || node.is_silent) return;
  const std::vector<controller::ClientEvent> events = node.client->process(clock_.now());
  for (const controller::ClientEvent& event : events) {
    if (const auto* reply = std::get_if<controller::LookupReply>(&event)) {
      answered(node, *reply, clock_.now());
    } else if (const auto* failed = std::get_if<controller::LookupFailed>(&event)) {
      ++times_.num_failed;
      std::erase_if(node.asked, [&](const Asked& asked) { return asked.token == failed->token; });
    } else if (std::holds_alternative<controller::Registered>(event)) {
      node.is_registered = true;
    } else if (std::holds_alternative<controller::SnapshotWanted>(event)) {
      publish_snapshot(node);
    } else if (std::holds_alternative<controller::Lost>(event)) {
      node.is_registered = node.is_published = false;
    } else if (const auto* refused = std::get_if<controller::Refused>(&event)) {
      refusal_ = refused->reason;
    }
  }
  if (node.is_registered && !node.is_published) node.is_published = node.client->kept_below() >= node.published_below;
}

void Fleet::publish_snapshot(Node& node) {
  node.held.all(chunks_);
  node.client->publish(chunks_);
  node.client->end_snapshot();
  node.published_below = node.client->next_sequence();
}

void Fleet::answered(Node& node, const controller::LookupReply& reply, TimeNs now) {
  const auto asked = std::find_if(node.asked.begin(), node.asked.end(),
                                  [&](const Asked& candidate) { return candidate.token == reply.token; });
  if (asked == node.asked.end()) return;
  const std::string holder = fmt::format("node{}", asked->holder);
  const bool is_named = std::any_of(reply.holders.begin(), reply.holders.end(), [&](const controller::Holder& found) {
    return found.engine_id.value == holder && found.num_full_chunks == kConversationChunks;
  });
  if (asked->is_probe) {
    std::optional<TimeNs>& seen = nodes_[asked->holder].seen_gone;
    if (!is_named && !seen) seen = now;
  } else {
    times_.us.push_back(static_cast<double>(now - asked->at) * 1e-3);
    if (!is_named && is_up(asked->holder)) ++times_.num_wrong;
    if (now - asked->at > kSlow) slow_.emplace_back(asked->at, now);
  }
  node.asked.erase(asked);
}

bool Fleet::is_up(std::uint32_t node) const { return nodes_[node].is_registered && nodes_[node].is_published; }

std::uint32_t Fleet::num_registered() const {
  return static_cast<std::uint32_t>(
      std::count_if(nodes_.begin(), nodes_.end(), [](const Node& node) { return node.is_registered; }));
}

std::uint32_t Fleet::num_up() const {
  return static_cast<std::uint32_t>(std::count_if(
      nodes_.begin(), nodes_.end(), [](const Node& node) { return node.is_registered && node.is_published; }));
}

LookupTimes Fleet::take_lookups() {
  slow_.clear();
  return std::exchange(times_, {});
}

std::size_t Fleet::num_waiting() const {
  std::size_t num_waiting = 0;
  for (const Node& node : nodes_) num_waiting += node.asked.size();
  return num_waiting;
}

std::optional<TimeNs> Fleet::last_slow(TimeNs older_than) const {
  std::optional<TimeNs> last;
  for (const auto& [asked, answered] : slow_) {
    if (answered - asked >= older_than) last = std::max(last.value_or(0), answered);
  }
  return last;
}

std::optional<TimeNs> Fleet::seen_gone(std::uint32_t node) const { return nodes_[node].seen_gone; }

TimeNs Fleet::take_lateness() { return static_cast<TimeNs>(std::exchange(num_late_ticks_, 0)) * kMillisecond; }

}  // namespace kvferry::bench
