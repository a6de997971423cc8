#include <sys/epoll.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "controller/client/client_link.h"
#include "controller/client/client_session.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {
namespace {

// Limit on unanswered lookups. At this limit lookup() fails if lookups have a timeout; otherwise it drops the oldest
// lookup.
constexpr std::size_t kPendingLookupsMax = 16'384;
// A lookup is sent again whenever lookup_timeout_ms / kAsksPerTimeout has passed without an answer.
constexpr std::int64_t kAsksPerTimeout = 3;

class ReplicaClient final : public Client {
 public:
  ReplicaClient(std::vector<std::unique_ptr<Client>> clients, const ClientOptions& options)
      : options_(options), timeout_(options.lookup_timeout_ms * kMillisecond) {
    for (std::unique_ptr<Client>& client : clients) replicas_.push_back({.client = std::move(client), .asked = {}});
  }

  bool watch() {
    return std::all_of(replicas_.begin(), replicas_.end(), [&](const Replica& replica) {
      epoll_event event{.events = EPOLLIN, .data = {}};
      return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, replica.client->fd(), &event) == 0;
    });
  }

  int fd() const override { return epoll_.get(); }
  bool registered() const override { return first_registered(0) != nullptr; }
  const std::string& controller() const override { return options_.controller; }
  bool has_cluster_key() const override { return options_.cluster_key.has_value(); }
  /// Each controller has its own series of numbers; the two functions below refer to the controller that lookups are
  /// sent to.
  std::uint64_t next_sequence() const override { return preferred().next_sequence(); }
  std::uint64_t kept_below() const override { return preferred().kept_below(); }

  std::vector<ClientEvent> process(TimeNs now) override {
    std::vector<ClientEvent> events;
    for (Replica& replica : replicas_) {
      for (ClientEvent& event : replica.client->process(now))
        std::visit([&](auto& known) { on(replica, known, events); }, event);
    }
    if (registered() != was_registered_) {
      was_registered_ = registered();
      if (was_registered_)
        // Registered must come before the SnapshotWanted that the registration caused.
        events.insert(events.begin(), Registered{});
      else
        events.emplace_back(Lost{lost_reason_});
    }
    for (auto pending = pending_.begin(); pending != pending_.end();) {
      const auto current = pending++;
      advance(current, now, events);
    }
    return events;
  }

  void set_load(std::uint64_t num_requests) override {
    for (const Replica& replica : replicas_) replica.client->set_load(num_requests);
  }
  void set_report(std::string report) override {
    for (const Replica& replica : replicas_) replica.client->set_report(report);
  }
  void publish(const std::vector<ChunkEntry>& chunks) override {
    for (const Replica& replica : replicas_) replica.client->publish(chunks);
  }
  void evict(const std::vector<ChunkKey>& keys) override {
    for (const Replica& replica : replicas_) replica.client->evict(keys);
  }
  void end_snapshot() override {
    for (const Replica& replica : replicas_) replica.client->end_snapshot();
  }
  void leave() override {
    for (const Replica& replica : replicas_) replica.client->leave();
    pending_.clear();
  }

  Result<std::uint64_t> lookup(const LookupQuery& query) override {
    KVFERRY_TRY(check_lookup(query));
    if (timeout_ > 0 && pending_.size() == kPendingLookupsMax)
      return Error{ErrorCode::kFull,
                   fmt::format("controller {} has not answered {} lookups, which is the limit; try again later",
                               options_.controller, pending_.size())};
    Pending pending{.query = query, .replica = nullptr, .ends_at = {}, .asked_at = {}};
    const std::uint64_t token = ++last_token_;
    const Result<void> asked = ask(token, pending, 0);
    // If lookups have a timeout, this lookup can still be sent when a controller registers the node before the timeout.
    if (!asked && timeout_ == 0) return asked.error();
    // If lookups have no timeout, the caller itself gives up lookups, the oldest first. So the oldest one may be
    // dropped here.
    if (pending_.size() == kPendingLookupsMax) drop(pending_.begin()->first);
    pending_.emplace(token, std::move(pending));
    return token;
  }

 private:
  struct Replica {
    std::unique_ptr<Client> client;
    // [token of the replica's client] token that this client returned for the same lookup
    std::map<std::uint64_t, std::uint64_t> asked;
    bool has_refused = false;
  };
  struct Pending {
    LookupQuery query;
    Replica* replica = nullptr;  // controller to which the lookup was sent; nullptr: process() must send it
    std::optional<TimeNs> ends_at, asked_at;
  };
  using PendingMap = std::map<std::uint64_t, Pending>;

  /// Returns the first replica from index `begin` on, wrapping around, with which the node is registered, or nullptr.
  Replica* first_registered(std::size_t begin) const {
    for (std::size_t i = 0; i < replicas_.size(); ++i) {
      const Replica& replica = replicas_[(begin + i) % replicas_.size()];
      if (replica.client->registered()) return const_cast<Replica*>(&replica);
    }
    return nullptr;
  }

  const Client& preferred() const {
    const Replica* replica = first_registered(0);
    return replica == nullptr ? *replicas_[0].client : *replica->client;
  }

  Result<void> ask(std::uint64_t token, Pending& pending, std::size_t begin) {
    pending.replica = nullptr;
    pending.asked_at.reset();
    Replica* replica = first_registered(begin);
    if (replica == nullptr)
      return Error{ErrorCode::kUnavailable,
                   fmt::format("this node is not registered with controller {}, so it can't look up chunks there",
                               options_.controller)};
    const std::uint64_t asked = KVFERRY_TRY(replica->client->lookup(pending.query));
    replica->asked[asked] = token;
    pending.replica = replica;
    return {};
  }

  void advance(PendingMap::iterator current, TimeNs now, std::vector<ClientEvent>& events) {
    auto& [token, pending] = *current;
    if (timeout_ == 0) {
      if (pending.replica == nullptr && !ask(token, pending, 0)) drop(token);
      return;
    }
    if (!pending.ends_at) pending.ends_at = now + timeout_;
    if (now >= *pending.ends_at) {
      events.emplace_back(LookupFailed{token, fmt::format("no answer came from controller {} within {} ms",
                                                          options_.controller, options_.lookup_timeout_ms)});
      return drop(token);
    }
    if (pending.replica == nullptr) {
      // If ask() fails, the next process() tries again, until the lookup's time has passed.
      (void)ask(token, pending, 0);
    } else if (pending.asked_at && now - *pending.asked_at >= timeout_ / kAsksPerTimeout) {
      (void)ask(token, pending, static_cast<std::size_t>(pending.replica - replicas_.data()) + 1);
    }
    if (pending.replica != nullptr && !pending.asked_at) pending.asked_at = now;
  }

  void drop(std::uint64_t token) {
    for (Replica& replica : replicas_)
      std::erase_if(replica.asked, [&](const auto& ask) { return ask.second == token; });
    pending_.erase(token);
  }
  /// Marks the lookups sent to `replica` as not sent, so that process() sends them to another controller.
  void give_up(Replica& replica) {
    replica.asked.clear();
    for (auto& [token, pending] : pending_) {
      if (pending.replica == &replica) pending.replica = nullptr;
    }
  }

  void on(Replica& replica, LookupReply& reply, std::vector<ClientEvent>& events) {
    const auto asked = replica.asked.find(reply.token);
    if (asked == replica.asked.end()) return;
    reply.token = asked->second;
    drop(reply.token);
    events.emplace_back(std::move(reply));
  }
  void on(Replica&, Registered&, std::vector<ClientEvent>&) {}  // process() reports the first registration
  void on(Replica& replica, Lost& lost, std::vector<ClientEvent>&) {
    lost_reason_ = std::move(lost.reason);
    give_up(replica);
  }
  void on(Replica& replica, Refused& refused, std::vector<ClientEvent>& events) {
    replica.has_refused = true;
    give_up(replica);
    lost_reason_ = fmt::format("controller {} refused this node: {}", replica.client->controller(), refused.reason);
    if (std::all_of(replicas_.begin(), replicas_.end(), [](const Replica& r) { return r.has_refused; })) {
      was_registered_ = false;  // prevents process() from reporting Lost as well
      events.emplace_back(std::move(refused));
    } else {
      log().warn("{}", lost_reason_);
    }
  }
  void on(Replica&, SnapshotWanted&, std::vector<ClientEvent>& events) { events.emplace_back(SnapshotWanted{}); }
  /// Controllers number their pins independently; unique_pin_id() makes the ids unique over all controllers.
  void on(Replica& replica, PinChunks& wanted, std::vector<ClientEvent>& events) {
    wanted.pin_id = unique_pin_id(replica, wanted.pin_id);
    events.emplace_back(std::move(wanted));
  }
  void on(Replica& replica, UnpinChunks& wanted, std::vector<ClientEvent>& events) {
    events.emplace_back(UnpinChunks{unique_pin_id(replica, wanted.pin_id)});
  }
  void on(Replica&, ReplicateChunks& wanted, std::vector<ClientEvent>& events) {
    events.emplace_back(std::move(wanted));
  }
  void on(Replica&, PurgeChunks& wanted, std::vector<ClientEvent>& events) { events.emplace_back(std::move(wanted)); }
  void on(Replica&, EvictChunks& wanted, std::vector<ClientEvent>& events) { events.emplace_back(std::move(wanted)); }
  std::uint64_t unique_pin_id(const Replica& replica, std::uint64_t pin_id) const {
    return pin_id * replicas_.size() + static_cast<std::uint64_t>(&replica - replicas_.data());
  }
  // Never called, because the clients of single controllers ignore lookup_timeout_ms.
  void on(Replica&, LookupFailed&, std::vector<ClientEvent>&) {}

  ClientOptions options_;
  TimeNs timeout_;
  std::vector<Replica> replicas_;
  PendingMap pending_;
  std::uint64_t last_token_ = 0;
  bool was_registered_ = false;
  std::string lost_reason_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
};

}  // namespace

Result<std::unique_ptr<Client>> make_replica_client(std::vector<std::unique_ptr<Client>> clients,
                                                    const ClientOptions& options) {
  auto client = std::make_unique<ReplicaClient>(std::move(clients), options);
  if (!client->watch())
    return Error{ErrorCode::kUnavailable,
                 "no file descriptor is left for the client of the controller's replicas; raise the limit (ulimit -n)"};
  return std::unique_ptr<Client>(std::move(client));
}

}  // namespace kvferry::controller
