#include "controller/engines/engine_events_listener.h"

#include <sys/epoll.h>

#include <algorithm>
#include <bit>
#include <deque>
#include <map>
#include <utility>

#include "controller/api/endpoint.h"
#include "controller/protocol/zmq_io.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {
namespace {

constexpr std::int64_t kBatchBytesMax = std::int64_t{64} << 20;  // enough for a prompt of millions of tokens
constexpr int kQueueMax = 1000;          // queued batches of an engine; dropped ones are requested again
constexpr int kMessagesPerTurnMax = 64;  // messages taken from one socket before the next one's
constexpr std::size_t kBytesPerTakeMax = std::size_t{4} << 20;
constexpr std::size_t kSocketsMax = 8192;
constexpr std::size_t kTidyLinesPerTake = 1024;
constexpr TimeNs kRound = 100 * kMillisecond;  // period at which all engines are polled
constexpr int kReconnectMs = 100;
constexpr int kReconnectMaxMs = 1000;  // longest pause between attempts to connect
constexpr std::size_t kPartsMax = 4;   // delimiter, topic (optional), sequence number, batch
constexpr std::uint64_t kEndOfReplay = ~std::uint64_t{0};

std::optional<std::uint64_t> sequence_of(const zmq::message_t& part) {
  if (part.size() != 8) return std::nullopt;
  std::uint64_t sequence = 0;
  for (std::size_t i = 0; i < 8; ++i) sequence = sequence << 8 | part.data<std::uint8_t>()[i];
  return sequence;
}

class ZmqEngineEventsListener final : public EngineEventsListener {
 public:
  explicit ZmqEngineEventsListener(EngineDirectory& directory)
      : directory_(directory), context_(1), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    context_.set(zmq::ctxopt::max_sockets, static_cast<int>(kSocketsMax));
  }
  ~ZmqEngineEventsListener() override {
    while (!sockets_.empty()) remove(sockets_.begin()->first);
  }

  Result<EngineDirectory::Added> add(const EngineInfo& info, TimeNs now) override {
    Result<void> checked = check_endpoint(info.endpoint, EndpointUse::kConnect);
    if (checked && !info.replay_endpoint.empty()) checked = check_endpoint(info.replay_endpoint, EndpointUse::kConnect);
    if (!checked) return checked.error();
    auto sockets = std::make_unique<EngineSockets>();
    try {
      sockets->events = zmq::socket_t(context_, zmq::socket_type::sub);
      set_options(sockets->events, info.endpoint);
      sockets->events.set(zmq::sockopt::subscribe, "");
      const std::string monitor = fmt::format("inproc://engine-{}", ++num_monitors_);
      if (zmq_socket_monitor(sockets->events.handle(), monitor.c_str(),
                             ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) != 0)
        throw zmq::error_t();
      sockets->monitor = zmq::socket_t(context_, zmq::socket_type::pair);
      sockets->monitor.connect(monitor);
    } catch (const zmq::error_t& failure) {
      return Error{ErrorCode::kUnavailable, fmt::format("cannot subscribe to {}: {}", info.endpoint, failure.what())};
    }
    Result<EngineDirectory::Added> added = directory_.add(info, now);
    if (!added || added->is_known) return added;
    if (added->replaced) close_sockets(*added->replaced);
    watch(sockets->events, added->id);
    watch(sockets->monitor, added->id);
    try {
      sockets->events.connect(info.endpoint);
    } catch (const zmq::error_t& failure) {
      directory_.remove(added->id);
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("cannot subscribe to {}: {}", info.endpoint, failure.what())};
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
    zmq::socket_t events, monitor, replay;
    bool is_ready = false;  // in ready_
  };

  static void set_options(zmq::socket_t& socket, const std::string& endpoint) {
    set_common_options(socket, endpoint);
    socket.set(zmq::sockopt::maxmsgsize, kBatchBytesMax);
    socket.set(zmq::sockopt::rcvhwm, kQueueMax);
    socket.set(zmq::sockopt::reconnect_ivl, kReconnectMs);
    socket.set(zmq::sockopt::reconnect_ivl_max, kReconnectMaxMs);
  }

  void watch(zmq::socket_t& socket, EngineNumber engine) const {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = engine;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, socket.get(zmq::sockopt::fd), &event);
  }
  void unwatch(zmq::socket_t& socket) const {
    if (!socket) return;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, socket.get(zmq::sockopt::fd), nullptr);
  }
  void close_sockets(EngineNumber engine) {
    const auto it = sockets_.find(engine);
    if (it == sockets_.end()) return;
    EngineSockets& sockets = *it->second;
    for (zmq::socket_t* socket : {&sockets.events, &sockets.monitor, &sockets.replay}) unwatch(*socket);
    zmq_socket_monitor(sockets.events.handle(), nullptr, 0);
    sockets_.erase(it);
  }

  void mark_ready(EngineNumber engine, EngineSockets& sockets) {
    if (std::exchange(sockets.is_ready, true)) return;
    ready_.push_back(engine);
  }

  /// Returns true if more messages wait. ZeroMQ's descriptors are edge-triggered, so a socket is drained or polled
  /// again.
  bool receive_from(EngineNumber engine, EngineSockets& sockets, TimeNs now, std::size_t& num_bytes) {
    EngineStream* stream = directory_.stream(engine);
    if (stream == nullptr) return false;
    // Connection events come first: batches after a disconnect belong to the new connection.
    bool has_more = read_monitor(sockets, *stream, now);
    zmq::message_t parts[kPartsMax];
    int num_messages = 0;
    for (; num_messages < kMessagesPerTurnMax && num_bytes < kBytesPerTakeMax; ++num_messages) {
      const std::size_t num_parts = try_receive(sockets.events, parts, kPartsMax);
      if (num_parts == 0) break;
      pass_batch(*stream, parts, num_parts, false, now, num_bytes);
    }
    has_more = has_more || num_messages == kMessagesPerTurnMax || num_bytes >= kBytesPerTakeMax;
    send_replay_request(engine, sockets);
    if (!sockets.replay) return has_more;
    for (num_messages = 0; num_messages < kMessagesPerTurnMax && num_bytes < kBytesPerTakeMax; ++num_messages) {
      const std::size_t num_parts = try_receive(sockets.replay, parts, kPartsMax);
      if (num_parts == 0) break;
      pass_batch(*stream, parts, num_parts, true, now, num_bytes);
    }
    send_replay_request(engine, sockets);
    return has_more || num_messages == kMessagesPerTurnMax || num_bytes >= kBytesPerTakeMax;
  }

  bool read_monitor(EngineSockets& sockets, EngineStream& stream, TimeNs now) {
    zmq::message_t parts[2];  // event with its value, address
    for (int i = 0; i < kMessagesPerTurnMax; ++i) {
      const std::size_t num_parts = try_receive(sockets.monitor, parts, std::size(parts));
      if (num_parts == 0) return false;
      std::uint16_t event = 0;
      if (parts[0].size() < sizeof event) continue;
      std::memcpy(&event, parts[0].data(), sizeof event);
      if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) stream.connected(now);
      if (event == ZMQ_EVENT_DISCONNECTED) stream.disconnected(now);
    }
    return true;
  }

  /// The last part is the batch, the one before it the sequence number; a topic may precede them.
  void pass_batch(EngineStream& stream, const zmq::message_t* parts, std::size_t num_parts, bool is_replay, TimeNs now,
                  std::size_t& num_bytes) {
    const std::optional<std::uint64_t> sequence =
        num_parts >= 2 && num_parts <= kPartsMax ? sequence_of(parts[num_parts - 2]) : std::nullopt;
    if (!sequence || (*sequence == kEndOfReplay && !is_replay)) {
      if (std::has_single_bit(++num_malformed_))
        log().warn("{} malformed messages from engines; the newest one has {} parts", num_malformed_, num_parts);
      return;
    }
    if (*sequence == kEndOfReplay) return stream.replay_ended(now);
    const std::string_view payload = parts[num_parts - 1].to_string_view();
    num_bytes += payload.size();
    if (is_replay)
      stream.replayed(*sequence, payload, now);
    else
      stream.received(*sequence, payload, now);
  }

  /// Opens a new connection for each replay, so that answers to older requests never arrive.
  void send_replay_request(EngineNumber engine, EngineSockets& sockets) {
    EngineStream* stream = directory_.stream(engine);
    const EngineInfo* info = directory_.info(engine);
    if (stream == nullptr || info == nullptr) return;
    const std::optional<std::uint64_t> first = stream->take_replay_request();
    if (!first) return;
    unwatch(sockets.replay);
    try {
      sockets.replay = zmq::socket_t(context_, zmq::socket_type::dealer);
      set_options(sockets.replay, info->replay_endpoint);
      sockets.replay.connect(info->replay_endpoint);
    } catch (const zmq::error_t& failure) {
      log().warn("cannot request a replay from {}: {}", info->replay_endpoint, failure.what());
      sockets.replay.close();
      return;
    }
    watch(sockets.replay, engine);
    char number[8];
    for (unsigned i = 0; i < 8; ++i) number[i] = static_cast<char>(*first >> (56 - 8 * i));
    if (try_send(sockets.replay, {}, zmq::send_flags::sndmore)) try_send(sockets.replay, {number, sizeof number});
    mark_ready(engine, sockets);  // sending may have consumed the edge of a received message
  }

  EngineDirectory& directory_;
  zmq::context_t context_;
  OwnedFd epoll_;
  std::map<EngineNumber, std::unique_ptr<EngineSockets>> sockets_;
  std::deque<EngineNumber> ready_;
  TimeNs last_round_ = 0;
  std::uint64_t num_monitors_ = 0;
  std::uint64_t num_malformed_ = 0;
};

}  // namespace

std::unique_ptr<EngineEventsListener> EngineEventsListener::make(EngineDirectory& directory) {
  return std::make_unique<ZmqEngineEventsListener>(directory);
}

}  // namespace kvferry::controller
