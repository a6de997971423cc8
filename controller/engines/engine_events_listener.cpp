#include "controller/engines/engine_events_listener.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <bit>
#include <deque>
#include <map>
#include <utility>

#include "controller/api/endpoint.h"
#include "transport/base/log.h"
#include "transport/base/net/zmq_socket.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {
namespace {

// Limit on the size of a batch; enough for a prompt of millions of tokens.
constexpr std::int64_t kBatchBytesMax = std::int64_t{64} << 20;
constexpr int kQueueMax = 1000;            // limit on a socket's waiting messages; senders may drop further messages
constexpr int kMessagesPerSocketMax = 64;  // limit on messages taken from one socket before the next socket is read
constexpr std::size_t kBytesPerTakeMax = std::size_t{4} << 20;
constexpr int kSocketsMax = 8192;
constexpr std::size_t kTidyLinesPerTake = 1024;
constexpr TimeNs kRound = 100 * kMillisecond;  // period at which all engines are polled
constexpr std::size_t kPartsMax = 4;           // limit on a message's parts: delimiter, topic, sequence number, batch
constexpr std::uint64_t kEndOfReplay = ~std::uint64_t{0};

std::optional<std::uint64_t> sequence_of(std::string_view part) {
  if (part.size() != 8) return std::nullopt;
  std::uint64_t sequence = 0;
  for (const char byte : part) sequence = sequence << 8 | static_cast<unsigned char>(byte);
  return sequence;
}

class ZmqEngineEventsListener final : public EngineEventsListener {
 public:
  explicit ZmqEngineEventsListener(EngineDirectory& directory)
      : directory_(directory), context_(std::make_shared<net::ZmqContext>(kSocketsMax)) {}
  ~ZmqEngineEventsListener() override {
    while (!sockets_.empty()) remove(sockets_.begin()->first);
  }

  Result<EngineDirectory::Added> add(const EngineInfo& info, TimeNs now) override {
    Result<void> checked = check_endpoint(info.endpoint, EndpointUse::kConnect);
    if (checked && !info.replay_endpoint.empty()) checked = check_endpoint(info.replay_endpoint, EndpointUse::kConnect);
    if (!checked) return checked.error();
    auto sockets = std::make_unique<EngineSockets>();
    const auto failed = [&](Error error) { return std::move(error).with("cannot subscribe to " + info.endpoint); };
    auto events = make_socket(net::ZmqKind::kSubscriber);
    if (!events) return failed(std::move(events).error());
    auto monitor = (*events)->make_monitor();
    if (!monitor) return failed(std::move(monitor).error());
    sockets->events = std::move(*events);
    sockets->monitor = std::move(*monitor);
    Result<EngineDirectory::Added> added = directory_.add(info, now);
    if (!added || added->is_known) return added;
    if (added->replaced) close_sockets(*added->replaced);
    watch(*sockets->events, added->id);
    watch(*sockets->monitor, added->id);
    if (Result<void> connected = sockets->events->connect(info.endpoint); !connected) {
      directory_.remove(added->id);
      return failed(std::move(connected).error());
    }
    sockets_[added->id] = std::move(sockets);
    log().info("subscribed to engine '{}' of model '{}', tenant '{}', at {}", info.instance_id, info.model, info.tenant,
               info.endpoint);
    return added;
  }

  void remove(EngineNumber engine) override {
    close_sockets(engine);
    directory_.remove(engine);
  }

  std::uint64_t num_malformed() const override { return num_malformed_; }
  int fd() const override { return epoll_.get(); }

  bool serve(TimeNs now) override {
    const bool is_round = now - last_round_ >= kRound;
    if (is_round) {
      last_round_ = now;
      for (const auto& [engine, sockets] : sockets_) mark_ready(engine, *sockets);
    } else {
      epoll_event ready[64];
      const int num_ready = ::epoll_wait(epoll_.get(), ready, std::size(ready), 0);
      for (int i = 0; i < num_ready; ++i) {
        const auto found = sockets_.find(static_cast<EngineNumber>(ready[i].data.u64));
        if (found != sockets_.end()) mark_ready(found->first, *found->second);
      }
    }
    std::size_t num_bytes = 0;
    for (std::size_t num_left = ready_.size(); num_left > 0 && num_bytes < kBytesPerTakeMax; --num_left) {
      const EngineNumber engine = ready_.front();
      ready_.pop_front();
      const auto it = sockets_.find(engine);
      if (it == sockets_.end()) continue;
      it->second->is_ready = false;
      if (receive_from(engine, *it->second, now, num_bytes)) mark_ready(engine, *it->second);
    }
    if (is_round) {
      directory_.tick(now);
      for (const auto& [engine, sockets] : sockets_) send_replay_request(engine, *sockets);
    }
    const bool is_untidy = directory_.tidy(kTidyLinesPerTake);
    return is_untidy || !ready_.empty();
  }

 private:
  struct EngineSockets {
    std::unique_ptr<net::ZmqSocket> events, monitor, replay;
    bool is_ready = false;  // whether ready_ contains this engine
  };

  Result<std::unique_ptr<net::ZmqSocket>> make_socket(net::ZmqKind kind) const {
    return net::ZmqSocket::make(context_, kind, {.message_bytes_max = kBatchBytesMax, .receive_queue_max = kQueueMax});
  }

  void watch(const net::ZmqSocket& socket, EngineNumber engine) const {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = engine;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.fd(), &event);
  }
  void unwatch(const std::unique_ptr<net::ZmqSocket>& socket) const {
    if (socket) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket->fd(), nullptr);
  }
  void close_sockets(EngineNumber engine) {
    const auto it = sockets_.find(engine);
    if (it == sockets_.end()) return;
    const EngineSockets& sockets = *it->second;
    for (const auto* socket : {&sockets.events, &sockets.monitor, &sockets.replay}) unwatch(*socket);
    sockets_.erase(it);
  }

  void mark_ready(EngineNumber engine, EngineSockets& sockets) {
    if (std::exchange(sockets.is_ready, true)) return;
    ready_.push_back(engine);
  }

  /// Processes messages from an engine's sockets. Returns true if more messages may wait: ZeroMQ's descriptors are
  /// edge-triggered, so a socket that was not drained must be read again without waiting for an event.
  bool receive_from(EngineNumber engine, EngineSockets& sockets, TimeNs now, std::size_t& num_bytes) {
    EngineStream* stream = directory_.stream(engine);
    if (stream == nullptr) return false;
    // Connection events are read first, because batches after a disconnect belong to the new connection.
    bool has_more = read_monitor(sockets, *stream, now);
    net::ZmqPart parts[kPartsMax];
    const auto drain = [&](net::ZmqSocket& socket, bool is_replay) {
      for (int i = 0; i < kMessagesPerSocketMax && num_bytes < kBytesPerTakeMax; ++i) {
        const std::size_t num_parts = socket.receive(parts);
        if (num_parts == 0) return;
        pass_batch(*stream, parts, num_parts, is_replay, now, num_bytes);
      }
      has_more = true;
    };
    drain(*sockets.events, false);
    send_replay_request(engine, sockets);
    if (!sockets.replay) return has_more;
    drain(*sockets.replay, true);
    send_replay_request(engine, sockets);
    return has_more;
  }

  bool read_monitor(EngineSockets& sockets, EngineStream& stream, TimeNs now) {
    for (int i = 0; i < kMessagesPerSocketMax; ++i) {
      const net::ZmqSocket::Change change = sockets.monitor->next_change();
      if (change == net::ZmqSocket::Change::kNone) return false;
      if (change == net::ZmqSocket::Change::kConnected)
        stream.connected(now);
      else
        stream.disconnected(now);
    }
    return true;
  }

  /// Passes a message to the stream. The message's last part is the batch, the part before that is the sequence number,
  /// and a delimiter and a topic may precede both.
  void pass_batch(EngineStream& stream, const net::ZmqPart* parts, std::size_t num_parts, bool is_replay, TimeNs now,
                  std::size_t& num_bytes) {
    const std::optional<std::uint64_t> sequence =
        num_parts >= 2 && num_parts <= kPartsMax ? sequence_of(parts[num_parts - 2].bytes()) : std::nullopt;
    if (!sequence || (*sequence == kEndOfReplay && !is_replay)) {
      if (std::has_single_bit(++num_malformed_))
        log().warn(
            "dropped a malformed message of an engine ({} so far): it has {} parts; allowed: 2 to {} parts, the last "
            "but one of which is a sequence number of 8 bytes",
            num_malformed_, num_parts, kPartsMax);
      return;
    }
    if (*sequence == kEndOfReplay) return stream.replay_ended(now);
    const std::string_view payload = parts[num_parts - 1].bytes();
    num_bytes += payload.size();
    if (is_replay)
      stream.replayed(*sequence, payload, now);
    else
      stream.received(*sequence, payload, now);
  }

  /// Requests the replay that the stream wants, if any. Uses a new connection for each request, so that answers to
  /// older requests never arrive.
  void send_replay_request(EngineNumber engine, EngineSockets& sockets) {
    EngineStream* stream = directory_.stream(engine);
    const EngineInfo* info = directory_.info(engine);
    if (stream == nullptr || info == nullptr) return;
    const std::optional<std::uint64_t> first = stream->take_replay_request();
    if (!first) return;
    unwatch(sockets.replay);
    sockets.replay.reset();
    auto replay = make_socket(net::ZmqKind::kDealer);
    const Result<void> connected = replay ? (*replay)->connect(info->replay_endpoint) : replay.error();
    if (!connected)
      return log().warn("cannot request a replay of missed KV events from engine '{}' at {}: {}", info->instance_id,
                        info->replay_endpoint, connected.error().what);
    sockets.replay = std::move(*replay);
    watch(*sockets.replay, engine);
    char number[8];
    for (unsigned i = 0; i < 8; ++i) number[i] = static_cast<char>(*first >> (56 - 8 * i));
    sockets.replay->send(std::array<std::string_view, 2>{"", {number, sizeof number}});
    mark_ready(engine, sockets);  // sending may have cleared the readiness event of a received message
  }

  EngineDirectory& directory_;
  std::shared_ptr<net::ZmqContext> context_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  std::map<EngineNumber, std::unique_ptr<EngineSockets>> sockets_;
  std::deque<EngineNumber> ready_;
  TimeNs last_round_ = 0;
  std::uint64_t num_malformed_ = 0;
};

}  // namespace

std::unique_ptr<EngineEventsListener> EngineEventsListener::make(EngineDirectory& directory) {
  return std::make_unique<ZmqEngineEventsListener>(directory);
}

}  // namespace kvferry::controller
