// A server on a thread, and nodes that talk to it over real sockets.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "controller/api/client.h"
#include "controller/api/endpoint.h"
#include "controller/server/server.h"
#include "tests/controller/fixtures.h"

namespace kvferry::controller {

constexpr std::int64_t kDeadlineMs = 20'000;  // much longer than anything in these tests takes, even with a sanitizer

inline const SteadyClock& steady_clock() {
  static const SteadyClock clock;
  return clock;
}

class LiveServer {
 public:
  /// The lease is long, except in tests of leases, because a node here sends no heartbeats while its test uses another
  /// node.
  explicit LiveServer(const std::string& bind, std::int64_t lease_ms = 600'000,
                      const std::optional<net::ClusterKey>& key = {})
      : server_(Server::bind(options(bind, lease_ms, key), steady_clock()).value()),
        key_(key),
        thread_([this] { server_->run(); }) {}
  ~LiveServer() {
    server_->stop();
    thread_.join();
  }
  const std::string& endpoint() const {
    return server_->stream_endpoint().empty() ? server_->endpoint() : server_->stream_endpoint();
  }
  Status status() const { return fetch_status(endpoint(), kDeadlineMs, key_).value(); }

 private:
  static ServerOptions options(const std::string& bind, std::int64_t lease_ms,
                               const std::optional<net::ClusterKey>& key) {
    ServerOptions options;
    options.directory.lease_ms = lease_ms;
    options.bind = is_stream(bind) ? "tcp://127.0.0.1:0" : bind;
    if (is_stream(bind)) options.stream = bind;
    options.cluster_key = key;
    return options;
  }

  std::unique_ptr<Server> server_;
  std::optional<net::ClusterKey> key_;
  std::thread thread_;
};

/// A client with a list of its events. It answers SnapshotWanted like a real node: publishes `held` and ends the
/// snapshot.
class LiveNode {
 public:
  LiveNode(const std::string& controller, const NodeInfo& info, std::int64_t heartbeat_ms = 50,
           const std::optional<net::ClusterKey>& key = {})
      : client_(make_client({.controller = controller,
                             .node = info,
                             .heartbeat_ms = heartbeat_ms,
                             .lost_after_ms = 1000,
                             .cluster_key = key})
                    .value()) {}

  Client& client() { return *client_; }
  void hold(const std::vector<ChunkEntry>& chunks) {
    held_.insert(held_.end(), chunks.begin(), chunks.end());
    client_->publish(chunks);
  }
  /// Runs one turn of the node's loop.
  void turn(int wait_ms = 5) {
    pollfd item{client_->fd(), POLLIN, 0};
    ::poll(&item, 1, wait_ms);
    for (ClientEvent& event : client_->process(steady_clock().now())) {
      if (std::holds_alternative<SnapshotWanted>(event)) {
        client_->publish(held_);
        client_->end_snapshot();
      }
      events_.push_back(std::move(event));
    }
  }
  template <class Event>
  std::size_t count() const {
    std::size_t n = 0;
    for (const ClientEvent& event : events_) n += std::holds_alternative<Event>(event) ? 1 : 0;
    return n;
  }
  template <class Event>
  const Event& last() const {
    for (auto event = events_.rbegin(); event != events_.rend(); ++event) {
      if (const auto* found = std::get_if<Event>(&*event)) return *found;
    }
    throw std::logic_error("no such event");
  }
  template <class Event>
  bool wait_for(std::size_t n = 1) {
    return wait_until([&] { return count<Event>() >= n; });
  }
  bool wait_until(const std::function<bool()>& reached) {
    const TimeNs deadline = steady_clock().now() + kDeadlineMs * kMillisecond;
    while (!reached()) {
      if (steady_clock().now() > deadline) return false;
      turn();
    }
    return true;
  }
  /// Returns "engine:full chunks" of each holder, in order. Repeats the lookup if the connection broke meanwhile.
  std::vector<std::string> who_has(const LookupQuery& query) {
    const std::size_t num_replies = count<LookupReply>();
    std::uint64_t token = 0;
    const bool replied = wait_until([&] {
      if (token == 0 || !client_->registered()) {
        const Result<std::uint64_t> asked = client_->lookup(query);
        token = asked ? *asked : 0;
      }
      return count<LookupReply>() > num_replies && last<LookupReply>().token == token;
    });
    if (!replied) return {"no reply"};
    std::vector<std::string> names;
    for (const Holder& holder : last<LookupReply>().holders)
      names.push_back(fmt::format("{}:{}", holder.engine_id, holder.num_full_chunks));
    return names;
  }
  /// Repeats the lookup until it gives the expected holders, because a publication has no reply.
  bool wait_to_see(const LookupQuery& query, const std::vector<std::string>& expected) {
    return wait_until([&] { return who_has(query) == expected; });
  }

 private:
  std::unique_ptr<Client> client_;
  std::vector<ChunkEntry> held_;
  std::vector<ClientEvent> events_;
};

inline LookupQuery ask_for(std::uint32_t from, std::uint32_t to) {
  return {.keys = keys_of(from, to), .tail_groups = {}, .exact_tails = {}};
}

}  // namespace kvferry::controller
