#include "controller/api/client.h"

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <array>

#include "controller/api/endpoint.h"
#include "controller/client/client_link.h"
#include "controller/client/client_session.h"
#include "transport/base/log.h"

namespace kvferry::controller {
namespace {

constexpr int kLeaveLingerMs = 150;

/// A client of one controller.
class SingleClient final : public Client {
 public:
  SingleClient(ClientOptions options, std::unique_ptr<ClientLink> link)
      : link_(std::move(link)),
        session_(std::move(options), [this](std::string_view bytes) { return link_->send(bytes); }) {}

  int fd() const override { return link_->fd(); }
  bool registered() const override { return session_.is_registered(); }
  std::uint64_t next_sequence() const override { return session_.publisher().next_sequence(); }
  std::uint64_t kept_below() const override { return session_.publisher().kept_below(); }
  const std::string& controller() const override { return session_.options().controller; }
  bool has_cluster_key() const override { return session_.options().cluster_key.has_value(); }

  std::vector<ClientEvent> process(TimeNs now) override {
    std::vector<ClientEvent> events;
    link_->process(now);
    while (const auto message = link_->receive()) session_.receive(*message, events);
    if (link_->has_broken()) session_.broken(events);
    if (session_.check_silence(now, events)) link_->reconnect();
    session_.send_due(now);
    return events;
  }

  void set_load(std::uint64_t num_requests) override { session_.set_load(num_requests); }
  void set_report(std::string report) override { session_.set_report(std::move(report)); }
  void publish(const std::vector<ChunkEntry>& chunks) override { session_.publish(chunks); }
  void evict(const std::vector<ChunkKey>& keys) override { session_.evict(keys); }
  void end_snapshot() override { session_.end_snapshot(); }
  Result<std::uint64_t> lookup(const LookupQuery& query) override { return session_.lookup(query); }
  void leave() override {
    if (session_.leave()) link_->linger(kLeaveLingerMs);
  }

 private:
  std::unique_ptr<ClientLink> link_;
  ClientSession session_;
};

/// Returns 128 random bits as text.
Result<std::string> make_secret() {
  std::array<std::uint8_t, 16> bits{};
  if (::getrandom(bits.data(), bits.size(), 0) != static_cast<ssize_t>(bits.size()))
    return Error{ErrorCode::kUnavailable,
                 "this node can't get the random bytes of its secret from Linux: getrandom() gave fewer than 16 bytes"};
  return fmt::format("{:02x}", fmt::join(bits, ""));
}

}  // namespace

std::unique_ptr<Client> make_client_over(std::unique_ptr<ClientLink> link, ClientOptions options) {
  return std::make_unique<SingleClient>(std::move(options), std::move(link));
}

Result<std::unique_ptr<Client>> make_client(const ClientOptions& options) {
  const std::vector<std::string> endpoints = KVFERRY_TRY(split_endpoints(options.controller));
  std::vector<std::unique_ptr<Client>> clients;
  // All replicas must get the same secret, because the event log passes each Hello on to the other replicas.
  const std::string secret = options.node.secret.empty() ? KVFERRY_TRY(make_secret()) : options.node.secret;
  for (const std::string& endpoint : endpoints) {
    std::unique_ptr<ClientLink> link = KVFERRY_TRY(make_link(endpoint, {.cluster_key = options.cluster_key}));
    ClientOptions replica_options = options;
    replica_options.controller = endpoint;
    replica_options.node.secret = secret;
    clients.push_back(make_client_over(std::move(link), std::move(replica_options)));
  }
  if (clients.size() == 1 && options.lookup_timeout_ms == 0) return std::move(clients[0]);
  return make_replica_client(std::move(clients), options);  // a replica client also enforces lookup_timeout_ms
}

namespace {

/// Same as the public wait_registered(). If the controller refuses the node, `newest` becomes
/// Refused::newest_incarnation.
Result<void> wait_registered(Client& client, const Clock& clock, std::int64_t timeout_ms, Incarnation& newest) {
  const TimeNs deadline = clock.now() + timeout_ms * kMillisecond;
  for (;;) {
    for (const ClientEvent& event : client.process(clock.now())) {
      if (const auto* refused = std::get_if<Refused>(&event)) {
        newest = refused->newest_incarnation;
        return Error{ErrorCode::kRefused,
                     fmt::format("controller {} refused this node: {}", client.controller(), refused->reason)};
      }
      if (std::holds_alternative<SnapshotWanted>(event)) client.end_snapshot();
    }
    if (client.registered()) return {};
    const TimeNs left = deadline - clock.now();
    if (left <= 0) {
      return Error{
          ErrorCode::kUnavailable,
          fmt::format("controller {} is not reachable: no answer within {} ms; start it with `kvferry controller`, "
                      "or name another one in the setting `controller`{}",
                      client.controller(), timeout_ms, cluster_key_hint(client.has_cluster_key()))};
    }
    pollfd item{client.fd(), POLLIN, 0};
    ::poll(&item, 1, static_cast<int>(std::min<TimeNs>(left / kMillisecond + 1, 100)));
  }
}

}  // namespace

Result<void> wait_registered(Client& client, const Clock& clock, std::int64_t timeout_ms) {
  Incarnation newest;
  return wait_registered(client, clock, timeout_ms, newest);
}

Result<std::unique_ptr<Client>> make_registered_client(ClientOptions& options, const Clock& clock,
                                                       std::int64_t timeout_ms) {
  // Three tries, because the second one fails if another process registers this engine id meanwhile.
  constexpr int kTriesMax = 3;
  for (int tries = 1;; ++tries) {
    std::unique_ptr<Client> client = KVFERRY_TRY(make_client(options));
    Incarnation newest;
    Result<void> registered = wait_registered(*client, clock, timeout_ms, newest);
    if (registered) return client;
    if (newest < options.node.incarnation || tries == kTriesMax) return std::move(registered).error();
    log().warn(
        "a process of node '{}' has registered with incarnation {}, which is not below the incarnation {} of this "
        "process; the clock may have been set back, or another process may use this engine id; this process now "
        "registers with incarnation {}",
        options.node.engine_id, newest, options.node.incarnation, newest.value + 1);
    options.node.incarnation = Incarnation{newest.value + 1};
  }
}

}  // namespace kvferry::controller
