#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "controller/client/client_link.h"
#include "controller/protocol/stream_socket.h"
#include "controller/protocol/wire.h"
#include "transport/base/log.h"
#include "transport/base/net/event_fd.h"
#include "transport/base/net/tcp_socket.h"

namespace kvferry::controller {
namespace {

constexpr std::size_t kReadBytes = std::size_t{64} << 10;
// Limit on unsent bytes; enough for a snapshot of four million chunks.
constexpr std::size_t kUnsentBytesMax = std::size_t{64} << 20;
constexpr TimeNs kBackOffMin = 100 * kMillisecond;
constexpr TimeNs kBackOffMax = kSecond;
constexpr TimeNs kConnectTime = 2 * kSecond;

/// Resolution of a host name by a detached thread: getaddrinfo() may take seconds and can't be cancelled.
struct HostLookup {
  std::string host;
  std::string number;  // numeric address that was found; empty: none was found
  std::atomic<bool> is_done{false};
  EventFd wake_up{std::nothrow};
};

class StreamLink final : public ClientLink {
 public:
  StreamLink(const std::string& endpoint, const LinkOptions& options)
      : endpoint_(endpoint), options_(options), address_(stream_address(endpoint)) {}
  ~StreamLink() override {
    const SteadyClock clock;
    const TimeNs ends_at = clock.now() + linger_;
    while (is_connected_ && !out_.empty() && clock.now() < ends_at) {
      pollfd item{socket_.get(), POLLOUT, 0};
      ::poll(&item, 1, static_cast<int>((ends_at - clock.now()) / kMillisecond + 1));
      flush();
    }
  }

  int fd() const override { return epoll_.get(); }

  void process(TimeNs now) override {
    is_drained_ = false;
    if (is_connected_) return flush();
    if (host_lookup_) return end_lookup(now);
    if (!socket_) {
      if (now < retry_at_) return;
      // A connection that breaks at once is not replaced before retry_at_.
      retry_at_ = now + back_off_;
      return begin(now);
    }
    pollfd item{socket_.get(), POLLOUT, 0};
    if (::poll(&item, 1, 0) == 0) {
      if (now >= give_up_at_) fail(now);
      return;
    }
    if (!net::connect_error(socket_.get()).empty()) return fail(now);
    is_connected_ = true;
    back_off_ = kBackOffMin;
    watch(EPOLL_CTL_MOD, socket_.get(), EPOLLIN);
  }

  std::optional<std::string_view> receive() override {
    for (;;) {
      const std::string_view rest = std::string_view(in_).substr(num_taken_);
      if (rest.size() >= kLengthBytes) {
        const std::uint32_t length = frame_length(rest);
        if (options_.is_bounded && length > wire::kMessageBytesMax) {
          log().warn(
              "controller {} announced a message of {} bytes, but at most {} are allowed; this process connects again",
              endpoint_, length, wire::kMessageBytesMax);
          close();
          return std::nullopt;
        }
        if (rest.size() - kLengthBytes >= length) {
          num_taken_ += kLengthBytes + length;
          return rest.substr(kLengthBytes, length);
        }
      }
      if (!is_connected_ || is_drained_) return std::nullopt;
      in_.erase(0, num_taken_);
      num_taken_ = 0;
      read_some();
    }
  }

  bool send(std::string_view message) override {
    if (!is_connected_ || !out_.add(message)) return false;
    if (!is_corked_) flush();
    return is_connected_;
  }
  void set_corked(bool is_corked) override {
    is_corked_ = is_corked;
    if (!is_corked && is_connected_) flush();
  }

  void reconnect() override {
    close();
    has_broken_ = false;  // a connection that its owner ends is not reported as broken
    retry_at_ = 0;
  }
  bool has_broken() override { return std::exchange(has_broken_, false); }
  void linger(int ms) override { linger_ = ms * kMillisecond; }

 private:
  void begin(TimeNs now) {
    if (address_.is_unix() || net::is_numeric(address_.tcp.host)) return begin_connect_to(address_, now);
    host_lookup_ = std::make_shared<HostLookup>();
    host_lookup_->host = address_.tcp.host;
    watch(EPOLL_CTL_ADD, host_lookup_->wake_up.fd(), EPOLLIN);
    std::thread([lookup = host_lookup_] {
      if (auto addresses = net::resolve(lookup->host)) lookup->number = std::move(addresses->front());
      lookup->is_done.store(true, std::memory_order_release);
      lookup->wake_up.set();
    }).detach();
  }
  void end_lookup(TimeNs now) {
    if (!host_lookup_->is_done.load(std::memory_order_acquire)) return;
    StreamAddress address = address_;
    address.tcp.host = host_lookup_->number;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, host_lookup_->wake_up.fd(), nullptr);
    host_lookup_.reset();
    if (address.tcp.host.empty()) return fail(now);
    begin_connect_to(address, now);
  }
  void begin_connect_to(const StreamAddress& address, TimeNs now) {
    Result<OwnedFd> socket = begin_connect(address);
    if (!socket) return fail(now);
    socket_ = std::move(*socket);
    give_up_at_ = now + kConnectTime;
    watch(EPOLL_CTL_ADD, socket_.get(), EPOLLOUT);
    if (address.is_unix()) process(now);  // a connection to a Unix socket is made at once, so it can be used now
  }

  void fail(TimeNs now) {
    socket_ = OwnedFd();
    retry_at_ = now + back_off_;
    back_off_ = std::min(2 * back_off_, kBackOffMax);
  }
  void close() {
    if (is_connected_) has_broken_ = true;
    is_connected_ = false;
    socket_ = OwnedFd();
    in_.clear();
    out_ = UnsentMessages(kUnsentBytesMax);
    num_taken_ = 0;
  }

  void read_some() {
    const long num_read = controller::read_some(socket_.get(), scratch_);
    is_drained_ = num_read < static_cast<long>(scratch_.size());
    if (num_read == 0) return close();
    if (num_read > 0) in_.append(scratch_, 0, static_cast<std::size_t>(num_read));
  }

  void flush() {
    if (!out_.write_to(socket_.get())) return close();
    if (out_.empty() == waits_for_room_) {
      waits_for_room_ = !waits_for_room_;
      watch(EPOLL_CTL_MOD, socket_.get(), waits_for_room_ ? EPOLLIN | EPOLLOUT : EPOLLIN);
    }
  }

  void watch(int how, int fd, std::uint32_t events) const {
    epoll_event event{.events = events, .data = {}};
    ::epoll_ctl(epoll_.get(), how, fd, &event);  // if this fails, the owner's next turn still checks the socket
  }

  std::string endpoint_;
  LinkOptions options_;
  StreamAddress address_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  OwnedFd socket_;
  std::shared_ptr<HostLookup> host_lookup_;
  bool is_connected_ = false, has_broken_ = false, waits_for_room_ = false, is_corked_ = false;
  bool is_drained_ = false;  // the socket has no more input in this turn
  TimeNs retry_at_ = 0, back_off_ = kBackOffMin, give_up_at_ = 0, linger_ = 0;
  std::string scratch_ = std::string(kReadBytes, '\0');
  std::string in_;
  std::size_t num_taken_ = 0;
  UnsentMessages out_{kUnsentBytesMax};
};

}  // namespace

Result<std::unique_ptr<ClientLink>> make_stream_link(const std::string& endpoint, const LinkOptions& options) {
  auto link = std::make_unique<StreamLink>(endpoint, options);
  if (link->fd() < 0)
    return Error{ErrorCode::kUnavailable,
                 "no file descriptor is left for a connection to the controller; raise the limit (ulimit -n)"};
  return std::unique_ptr<ClientLink>(std::move(link));
}

}  // namespace kvferry::controller
