#include "controller/scale/replica.h"

#include <sys/epoll.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "controller/protocol/wire.h"
#include "controller/scale/etcd.h"
#include "controller/scale/event_log.h"
#include "controller/scale/redis_stream.h"
#include "controller/scale/replicated_state.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller::scale {
namespace {

constexpr std::size_t kEventsPerTurn = 16;  // limit on etcd events in one turn
constexpr std::size_t kEntriesPerTurn = 2;  // limit on log entries in one turn; most entries have at most 64 KiB
// Limit on how long a replica reads on after it has reached the log's end, while it knows some nodes only from the log.
constexpr std::int64_t kFollowMs = 10'000;
// Limit on how long a replica reads the log. By then all nodes that can reach this replica have sent Hello to it.
constexpr std::int64_t kReadMsMax = 60'000;
constexpr std::int64_t kShutdownMs = 300;
constexpr TimeNs kQuotaLasts = 30 * 24 * 3600 * kSecond;  // lifetime of a quota in etcd, for replicas that start later
constexpr std::size_t kLogBufferMax = 16U << 20;

class ReplicaListener final : public Listener, private SessionObserver {
 public:
  ReplicaListener(ReplicaOptions options, Sessions& sessions, TimeNs now)
      : options_(std::move(options)),
        sessions_(sessions),
        shared_({.prefix = options_.etcd ? options_.etcd->prefix + "/" : "",
                 .name = options_.name,
                 .endpoint = options_.endpoint,
                 .run = options_.run,
                 .lease_s = options_.lease_s}),
        writer_(
            {.writer = fmt::format("{} {}", options_.name, options_.run), .remember_ms = 3 * options_.lease_s * 1000},
            [this](std::string entry) { return log_->append(std::move(entry)); }),
        started_at_(now) {
    if (options_.etcd) {
      etcd_ = make_etcd({.url = *options_.etcd, .watched_prefix = options_.etcd->prefix + "/"});
      watch(etcd_->fd());
    }
    if (options_.event_log) {
      log_ = make_redis_stream({.url = *options_.event_log, .buffer_bytes_max = kLogBufferMax});
      watch(log_->fd());
      log_->start_reading();
      is_reading_ = true;
    }
    list_replicas();
    sessions_.set_observer(this);
  }
  ~ReplicaListener() override {
    sessions_.set_observer(nullptr);
    revoke_lease();
  }

  int fd() const override { return epoll_.get(); }

  bool serve(TimeNs now) override {
    bool has_more = false;
    if (etcd_) {
      const std::vector<EtcdEvent> events = etcd_->take(kEventsPerTurn);
      for (const EtcdEvent& event : events) shared_.on(event, now);
      has_more = events.size() == kEventsPerTurn;
      for (auto& [token, request] : shared_.due(now)) etcd_->ask(token, std::move(request));
      for (const SharedNews& news : shared_.take_news()) apply(news, now);
      log_etcd_state();
    }
    if (log_) {
      has_more |= read_log(now);
      const LogState state = log_->state();
      log_event_log_state(state);
      const bool is_first = shared_.replicas().front().name == options_.name && !shared_.is_name_taken();
      writer_.set_writing(!etcd_ || is_first);
      writer_.flush(now, state.buffered_bytes < kLogBufferMax / 2);
    }
    return has_more;
  }

 private:
  std::optional<std::string> refusal(const NodeInfo& info) const override {
    const std::optional<Incarnation> newest = shared_.newest(name_of(info));
    if (!newest || *newest <= info.incarnation) return std::nullopt;
    return fmt::format(
        "node '{}' is registered with the newer incarnation {} at one of this controller's replicas, so incarnation {} "
        "is refused as out of date; if both processes are to run, give each an engine id of its own",
        info.engine_id, *newest, info.incarnation);
  }
  Incarnation newest(const NodeInfo& info) const override {
    return shared_.newest(name_of(info)).value_or(Incarnation{});
  }
  void joined(NodeId node, const NodeInfo& info, std::uint64_t next_sequence, TimeNs now) override {
    reader_.remove(node);
    if (etcd_) shared_.joined(name_of(info), info.incarnation, now);
    here_[node] = name_of(info);
    if (log_) writer_.joined(node, info, next_sequence, now);
  }
  void received(NodeId node, std::uint64_t sequence, std::string_view message, TimeNs now) override {
    if (log_) writer_.updated(node, sequence, sessions_.directory().repair(node).resend_from, message, now);
  }
  void gone(NodeId node, TimeNs now) override {
    reader_.remove(node);
    if (log_) writer_.gone(node, now);
    const auto name = here_.find(node);
    if (name == here_.end()) return;
    shared_.left(name->second, now);
    here_.erase(name);
  }
  void executed(const wire::AdminRequest& command, TimeNs now) override {
    // The only command that is shared is a quota's: one replica alone can order nodes to drain, move or pin, but all
    // replicas must know a quota.
    if (!etcd_ || command.verb != "quota") return;
    const Result<void> set = shared_.set({.kind = "quotas",
                                          .id = command.name_space,
                                          .owner = options_.name,
                                          .value = encode(command),
                                          .deadline = now + kQuotaLasts},
                                         now);
    if (!set)
      log().warn(
          "the quota of namespace '{}' could not be shared with the other replicas and applies to this one only: {}",
          command.name_space, set.error().what);
  }
  const std::vector<std::string>& replicas() const override { return endpoints_; }
  std::uint64_t replicas_version() const override { return endpoints_version_; }

  ScaleStatus status(TimeNs now) const override {
    ScaleStatus status;
    status.name = options_.name;
    for (const Replica& replica : shared_.replicas()) status.replicas.push_back({replica.name, replica.endpoint});
    if (etcd_) {
      std::vector<std::string> members;
      for (const ServiceUrl& member : options_.etcd->members) members.push_back(member.host_port());
      const std::optional<TimeNs> gone_since = shared_.etcd_gone_since();
      status.etcd = fmt::format("{}", fmt::join(members, ","));
      status.etcd_ok = !gone_since;
      // If etcd was never reachable, it counts as unreachable since this replica's start.
      if (gone_since)
        status.etcd_gone_ms = static_cast<std::uint64_t>((now - std::max(*gone_since, started_at_)) / kMillisecond);
      status.etcd_trouble = shared_.etcd_error();
      status.etcd_owed = shared_.num_dirty();
      status.name_taken = shared_.is_name_taken();
    }
    if (log_) {
      const LogState log = log_->state();
      status.event_log = options_.event_log->server.host_port();
      status.log_ok = log.is_connected;
      status.log_trouble = log.trouble;
      status.log_writer = writer_.is_writing();
      status.log_lag_bytes = log.buffered_bytes;
      status.log_appended = log.num_appended;
      status.log_holes = writer_.num_holes();
      status.log_read = num_read_;
      status.log_reading = is_reading_;
    }
    return status;
  }

  static NodeName name_of(const NodeInfo& info) { return {info.name_space, info.engine_id.value}; }
  void watch(int fd) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd,
                &event);  // if this fails, the loop's periodic serve() still finds the events
  }

  void apply(const SharedNews& news, TimeNs now) {
    if (std::holds_alternative<ReplicasChanged>(news)) return list_replicas();
    if (const auto* set = std::get_if<RecordSet>(&news); set != nullptr && set->record.kind == "quotas") {
      Result<wire::FromNode> command = wire::parse<wire::FromNode>(set->record.value);
      const auto* quota = command ? std::get_if<wire::AdminRequest>(&*command) : nullptr;
      if (quota != nullptr && quota->verb == "quota") sessions_.execute(*quota, now);
      return;
    }
    const auto* fenced = std::get_if<NodeFenced>(&news);
    if (fenced == nullptr) return;
    Directory& directory = sessions_.directory();
    const auto node = directory.find_node(fenced->node.name_space, fenced->node.engine_id);
    if (node && directory.node(*node)->info.incarnation < fenced->incarnation) sessions_.fence(*node, now);
  }

  void list_replicas() {
    std::vector<std::string> endpoints;
    for (const Replica& replica : shared_.replicas()) endpoints.push_back(replica.endpoint);
    if (endpoints == endpoints_) return;
    endpoints_ = std::move(endpoints);
    ++endpoints_version_;
    log().info("endpoints of the live replicas of this controller: {}", fmt::join(endpoints_, ", "));
  }

  /// Applies a few entries of the event log to the directory. Returns true if more entries wait.
  bool read_log(TimeNs now) {
    if (!is_reading_) return false;
    for (LogPart& part : log_->take()) {
      for (std::string& entry : part.entries) entries_.push_back(std::move(entry));
      if (part.at_end && !at_end_since_) at_end_since_ = now;
    }
    for (std::size_t n = std::min(entries_.size(), kEntriesPerTurn); n > 0; --n) {
      reader_.apply(entries_.front(), now);
      entries_.pop_front();
      ++num_read_;
    }
    if (!entries_.empty()) return true;
    const bool is_at_end =
        at_end_since_ && (reader_.num_nodes() == 0 || now - *at_end_since_ > kFollowMs * kMillisecond);
    if (is_at_end || now - started_at_ > kReadMsMax * kMillisecond) {
      is_reading_ = false;
      log_->stop_reading();
      log().info("finished reading the event log at {}, of which {} entries were read",
                 options_.event_log->server.host_port(), num_read_);
    }
    return false;
  }

  void log_etcd_state() {
    const bool is_gone = shared_.etcd_gone_since().has_value();
    if (is_gone == is_etcd_gone_) return;
    is_etcd_gone_ = is_gone;
    if (is_gone)
      log().warn("etcd can't be used ({}); this controller continues with what it knows and keeps trying",
                 shared_.etcd_error());
    else
      log().info("etcd can be used");
  }
  void log_event_log_state(const LogState& state) {
    if (state.is_connected == is_log_connected_) return;
    is_log_connected_ = state.is_connected;
    if (is_log_connected_)
      log().info("the event log at {} can be used", options_.event_log->server.host_port());
    else
      log().warn("the event log can't be used ({}); this controller continues without it and keeps trying",
                 state.trouble);
  }

  /// Revokes this replica's lease, so that the other replicas notice its shutdown at once.
  void revoke_lease() {
    std::optional<EtcdRequest> request = shared_.final_request();
    if (!etcd_ || !request || shared_.etcd_gone_since()) return;
    constexpr std::uint64_t kFinalToken = ~std::uint64_t{0};
    etcd_->ask(kFinalToken, std::move(*request));
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(kShutdownMs);
    while (std::chrono::steady_clock::now() < deadline) {
      for (const EtcdEvent& event : etcd_->take(kEventsPerTurn)) {
        const auto* reply = std::get_if<EtcdReply>(&event);
        if (reply != nullptr && reply->token == kFinalToken) return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  const ReplicaOptions options_;
  Sessions& sessions_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  ReplicatedState shared_;
  LogWriter writer_;
  LogReader reader_{sessions_.directory(), [this](const NodeInfo& info) { return !refusal(info); }};
  const TimeNs started_at_;
  std::unordered_map<NodeId, NodeName> here_;  // nodes that sent Hello to this replica
  std::vector<std::string> endpoints_;
  std::uint64_t endpoints_version_ = 0;
  bool is_etcd_gone_ = true;
  bool is_log_connected_ = false;
  bool is_reading_ = false;
  std::deque<std::string> entries_;  // entries that were read but not applied
  std::optional<TimeNs> at_end_since_;
  std::uint64_t num_read_ = 0;
  std::unique_ptr<Etcd> etcd_;
  std::unique_ptr<RedisStream> log_;
};

}  // namespace

std::unique_ptr<Listener> make_replica(ReplicaOptions options, Sessions& sessions, TimeNs now) {
  return std::make_unique<ReplicaListener>(std::move(options), sessions, now);
}

}  // namespace kvferry::controller::scale
