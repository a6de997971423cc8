#include <sys/epoll.h>

#include "controller/api/endpoint.h"
#include "controller/client/client_link.h"
#include "controller/protocol/wake_up.h"
#include "controller/protocol/zmq_io.h"
#include "transport/base/log.h"
#include "transport/base/owned_fd.h"

namespace kvferry::controller {

class ZmqThreads {
 public:
  zmq::context_t context{1};
};

std::shared_ptr<ZmqThreads> make_zmq_threads(int sockets_max) {
  auto threads = std::make_shared<ZmqThreads>();
  threads->context.set(zmq::ctxopt::max_sockets, sockets_max);
  return threads;
}

namespace {

constexpr int kSendQueueMax = 10'000;  // room for a snapshot of 160 million chunks

class ZmqLink final : public ClientLink {
 public:
  ZmqLink(const std::string& endpoint, std::shared_ptr<ZmqThreads> threads)
      : endpoint_(endpoint), threads_(threads ? std::move(threads) : std::make_shared<ZmqThreads>()) {}

  Result<void> connect(LinkOptions options) {
    try {
      set_common_options(socket_, endpoint_);
      if (!options.is_bounded) socket_.set(zmq::sockopt::maxmsgsize, std::int64_t{-1});
      // Messages queued for a dead controller would reach its successor out of date.
      socket_.set(zmq::sockopt::immediate, true);
      socket_.set(zmq::sockopt::sndhwm, kSendQueueMax);
      socket_.set(zmq::sockopt::reconnect_ivl, 100);
      socket_.set(zmq::sockopt::reconnect_ivl_max, 1000);
      socket_.set(zmq::sockopt::connect_timeout, 2000);
      socket_.connect(endpoint_);
      return watch(socket_.get(zmq::sockopt::fd)) && watch(wake_up_.fd())
                 ? Result<void>{}
                 : Error{ErrorCode::kUnavailable, "no file descriptor left for the controller's client"};
    } catch (const zmq::error_t& failure) {
      return Error{ErrorCode::kInvalidArgument, fmt::format("can't connect to {}: {}", endpoint_, failure.what())};
    }
  }

  int fd() const override { return epoll_.get(); }
  void process(TimeNs) override { wake_up_.clear(); }

  std::optional<std::string_view> receive() override {
    for (std::size_t num_frames = 0; (num_frames = try_receive(socket_, &frame_, 1)) > 0;) {
      if (num_frames == 1) return frame_.to_string_view();
    }
    return std::nullopt;
  }

  bool send(std::string_view message) override {
    const bool sent = try_send(socket_, message);
    // Sending may consume the edge that signals a waiting message.
    if ((socket_.get(zmq::sockopt::events) & ZMQ_POLLIN) != 0) wake_up_.raise();
    return sent;
  }

  void set_corked(bool) override {}  // ZeroMQ's thread batches messages

  void reconnect() override {
    try {
      socket_.disconnect(endpoint_);
      socket_.connect(endpoint_);
    } catch (const zmq::error_t& failure) {
      log().error("can't connect to {} again: {}", endpoint_, failure.what());
    }
  }
  bool has_broken() override { return false; }  // ZeroMQ does not report it
  void linger(int ms) override { socket_.set(zmq::sockopt::linger, ms); }

 private:
  bool watch(int fd) {
    epoll_event event{.events = EPOLLIN, .data = {}};
    return ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) == 0;
  }

  std::string endpoint_;
  zmq::message_t frame_;
  WakeUp wake_up_;
  OwnedFd epoll_{::epoll_create1(EPOLL_CLOEXEC)};
  std::shared_ptr<ZmqThreads> threads_;  // must outlive the socket
  zmq::socket_t socket_{threads_->context, zmq::socket_type::dealer};
};

}  // namespace

Result<std::unique_ptr<ClientLink>> make_zmq_link(const std::string& endpoint, LinkOptions options) {
  auto link = std::make_unique<ZmqLink>(endpoint, options.zmq_threads);
  if (Result<void> connected = link->connect(options); !connected) return std::move(connected).error();
  return std::unique_ptr<ClientLink>(std::move(link));
}

Result<std::unique_ptr<ClientLink>> make_link(const std::string& endpoint, LinkOptions options) {
  if (Result<void> checked = check_endpoint(endpoint, EndpointUse::kConnect); !checked)
    return std::move(checked).error();
  return is_stream(endpoint) ? make_stream_link(endpoint, options) : make_zmq_link(endpoint, options);
}

}  // namespace kvferry::controller
