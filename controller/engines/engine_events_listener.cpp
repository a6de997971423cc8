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

constexpr std::int64_t kBatchBytesMax = std::int64_t{64} << 20;  // a prompt of millions of tokens
constexpr int kQueueMax = 1000;          // batches of an engine; what doesn't fit is asked for again
constexpr int kMessagesPerTurnMax = 64;  // of one socket, before the next one's
constexpr std::size_t kBytesPerTakeMax = std::size_t{4} << 20;
constexpr std::size_t kSocketsMax = 8192;
constexpr std::size_t kTidyLinesPerTake = 1024;
constexpr TimeNs kRound = 100 * kMillisecond;  // everybody is looked at, whatever the descriptors say
constexpr int kReconnectMs = 100;
constexpr int kReconnectMaxMs = 1000;  // at which an engine that never answers is tried
constexpr std::size_t kFramesMax = 4;  // replays: an empty one, perhaps the topic, sequence number, batch
constexpr std::uint64_t kEndOfReplay = ~std::uint64_t{0};

std::optional<std::uint64_t> sequence_of(const zmq::message_t& frame) {
  if (frame.size() != 8) return std::nullopt;
  std::uint64_t sequence = 0;
  for (std::size_t i = 0; i < 8; ++i) sequence = sequence << 8 | frame.data<std::uint8_t>()[i];
  return sequence;
}

class ZmqEngineEventsListener final : public EngineEventsListener {
 public:
  explicit ZmqEngineEventsListener(EngineDirectory& directory)
      : directory_(directory), context_(1), epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    context_.set(zmq::ctxopt::max_sockets, static_cast<int>(kSocketsMax));
  }
  ~ZmqEngineEventsListener() override {
    while (!links_.empty()) remove(links_.begin()->first);
  }

  Result<EngineDirectory::Added> add(const EngineInfo& info, TimeNs now) override {
    Result<void> checked = check_endpoint(info.endpoint, EndpointUse::kConnect);
    if (checked && !info.replay_endpoint.empty()) checked = check_endpoint(info.replay_endpoint, EndpointUse::kConnect);
    if (!checked) return checked.error();
    auto link = std::make_unique<Link>();
    try {
      link->events = zmq::socket_t(context_, zmq::socket_type::sub);
      set_options(link->events, info.endpoint);
      link->events.set(zmq::sockopt::subscribe, "");
      const std::string monitor = fmt::format("inproc://engine-{}", ++num_monitors_);
      if (zmq_socket_monitor(link->events.handle(), monitor.c_str(),
                             ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED) != 0)
        throw zmq::error_t();
      link->monitor = zmq::socket_t(context_, zmq::socket_type::pair);
      link->monitor.connect(monitor);
    } catch (const zmq::error_t& failure) {
      return Error{ErrorCode::kUnavailable, fmt::format("can't follow {}: {}", info.endpoint, failure.what())};
    }
    Result<EngineDirectory::Added> added = directory_.add(info, now);
    if (!added || added->is_known) return added;
    if (added->replaced) drop_link(*added->replaced);
    watch(link->events, added->id);
    watch(link->monitor, added->id);
    try {
      link->events.connect(info.endpoint);
    } catch (const zmq::error_t& failure) {
      directory_.remove(added->id);
      return Error{ErrorCode::kInvalidArgument, fmt::format("can't follow {}: {}", info.endpoint, failure.what())};
    }
    links_[added->id] = std::move(link);
    log().info("following engine '{}' of model '{}', tenant '{}', at {}", info.instance_id, info.model, info.tenant,
               info.endpoint);
    return added;
  }

  void remove(EngineNumber engine) override {
    drop_link(engine);
    directory_.remove(engine);
  }

  std::uint64_t num_malformed() const override { return num_malformed_; }
  int fd() const override { return epoll_.get(); }

  bool take(TimeNs now) override {
    const bool is_round = now - last_round_ >= kRound;
    if (is_round) {
      last_round_ = now;
      for (const auto& [engine, link] : links_) want(engine, *link);
    } else {
      epoll_event ready[64];
      const int num_ready = ::epoll_wait(epoll_.get(), ready, std::size(ready), 0);
      for (int i = 0; i < num_ready; ++i) {
        const auto link = links_.find(static_cast<EngineNumber>(ready[i].data.u64));
        if (link != links_.end()) want(link->first, *link->second);
      }
    }
    std::size_t num_bytes = 0;
    for (std::size_t num_left = ready_.size(); num_left > 0 && num_bytes < kBytesPerTakeMax; --num_left) {
      const EngineNumber engine = ready_.front();
      ready_.pop_front();
      const auto it = links_.find(engine);
      if (it == links_.end()) continue;
      it->second->is_ready = false;
      if (take_from(engine, *it->second, now, num_bytes)) want(engine, *it->second);
    }
    if (is_round) {
      directory_.tick(now);
      for (const auto& [engine, link] : links_) send_wish(engine, *link);
    }
    const bool is_untidy = directory_.tidy(kTidyLinesPerTake);
    return is_untidy || !ready_.empty();
  }

 private:
  struct Link {
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
  void drop_link(EngineNumber engine) {
    const auto it = links_.find(engine);
    if (it == links_.end()) return;
    Link& link = *it->second;
    for (zmq::socket_t* socket : {&link.events, &link.monitor, &link.replay}) unwatch(*socket);
    zmq_socket_monitor(link.events.handle(), nullptr, 0);
    links_.erase(it);
  }

  void want(EngineNumber engine, Link& link) {
    if (std::exchange(link.is_ready, true)) return;
    ready_.push_back(engine);
  }

  /// True: more waits. The descriptors only tell of news, so each socket is emptied or comes again.
  bool take_from(EngineNumber engine, Link& link, TimeNs now, std::size_t& num_bytes) {
    EngineStream* stream = directory_.stream(engine);
    if (stream == nullptr) return false;
    // First what became of the connection: batches that come after a break are of another one.
    bool has_more = take_monitor(link, *stream, now);
    zmq::message_t frames[kFramesMax];
    int num_messages = 0;
    for (; num_messages < kMessagesPerTurnMax && num_bytes < kBytesPerTakeMax; ++num_messages) {
      const std::size_t num_frames = try_receive(link.events, frames, kFramesMax);
      if (num_frames == 0) break;
      take_batch(*stream, frames, num_frames, false, now, num_bytes);
    }
    has_more = has_more || num_messages == kMessagesPerTurnMax || num_bytes >= kBytesPerTakeMax;
    send_wish(engine, link);
    if (!link.replay) return has_more;
    for (num_messages = 0; num_messages < kMessagesPerTurnMax && num_bytes < kBytesPerTakeMax; ++num_messages) {
      const std::size_t num_frames = try_receive(link.replay, frames, kFramesMax);
      if (num_frames == 0) break;
      take_batch(*stream, frames, num_frames, true, now, num_bytes);
    }
    send_wish(engine, link);
    return has_more || num_messages == kMessagesPerTurnMax || num_bytes >= kBytesPerTakeMax;
  }

  bool take_monitor(Link& link, EngineStream& stream, TimeNs now) {
    zmq::message_t frames[2];  // event and value, address
    for (int i = 0; i < kMessagesPerTurnMax; ++i) {
      const std::size_t num_frames = try_receive(link.monitor, frames, std::size(frames));
      if (num_frames == 0) return false;
      std::uint16_t event = 0;
      if (frames[0].size() < sizeof event) continue;
      std::memcpy(&event, frames[0].data(), sizeof event);
      if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) stream.connected(now);
      if (event == ZMQ_EVENT_DISCONNECTED) stream.disconnected(now);
    }
    return true;
  }

  /// With and without a topic in front: the last frame is the batch, the one before it the number.
  void take_batch(EngineStream& stream, const zmq::message_t* frames, std::size_t num_frames, bool is_replay,
                  TimeNs now, std::size_t& num_bytes) {
    const std::optional<std::uint64_t> sequence =
        num_frames >= 2 && num_frames <= kFramesMax ? sequence_of(frames[num_frames - 2]) : std::nullopt;
    if (!sequence || (*sequence == kEndOfReplay && !is_replay)) {
      if (std::has_single_bit(++num_malformed_))
        log().warn("{} messages of engines were no batches; the newest has {} frames", num_malformed_, num_frames);
      return;
    }
    if (*sequence == kEndOfReplay) return stream.replay_ended(now);
    const std::string_view payload = frames[num_frames - 1].to_string_view();
    num_bytes += payload.size();
    if (is_replay)
      stream.replayed(*sequence, payload, now);
    else
      stream.heard(*sequence, payload, now);
  }

  /// On a connection of its own, so that what older requests bring never comes.
  void send_wish(EngineNumber engine, Link& link) {
    EngineStream* stream = directory_.stream(engine);
    const EngineInfo* info = directory_.info(engine);
    if (stream == nullptr || info == nullptr) return;
    const std::optional<std::uint64_t> wish = stream->take_replay_wish();
    if (!wish) return;
    unwatch(link.replay);
    try {
      link.replay = zmq::socket_t(context_, zmq::socket_type::dealer);
      set_options(link.replay, info->replay_endpoint);
      link.replay.connect(info->replay_endpoint);
    } catch (const zmq::error_t& failure) {
      log().warn("can't ask {} for a replay: {}", info->replay_endpoint, failure.what());
      link.replay.close();
      return;
    }
    watch(link.replay, engine);
    char number[8];
    for (unsigned i = 0; i < 8; ++i) number[i] = static_cast<char>(*wish >> (56 - 8 * i));
    if (try_send(link.replay, {}, zmq::send_flags::sndmore)) try_send(link.replay, {number, sizeof number});
    want(engine, link);  // sending may have swallowed the news of something received
  }

  EngineDirectory& directory_;
  zmq::context_t context_;
  OwnedFd epoll_;
  std::map<EngineNumber, std::unique_ptr<Link>> links_;
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
