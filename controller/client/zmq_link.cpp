#include "controller/api/endpoint.h"
#include "controller/client/client_link.h"
#include "controller/protocol/wire.h"
#include "transport/base/log.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::controller {
namespace {

constexpr int kSendQueueMax = 10'000;  // limit on queued messages; enough for a snapshot of 160 million chunks
constexpr int kConnectTimeoutMs = 2000;

class ZmqLink final : public ClientLink {
 public:
  explicit ZmqLink(std::unique_ptr<net::ZmqSocket> socket) : socket_(std::move(socket)) {}

  int fd() const override { return socket_->fd(); }
  void process(TimeNs) override {}

  std::optional<std::string_view> receive() override {
    for (std::size_t num_parts = 0; (num_parts = socket_->receive(std::span(&part_, 1))) > 0;) {
      if (num_parts == 1) return part_.bytes();
    }
    return std::nullopt;
  }

  bool send(std::string_view message) override { return socket_->send(message); }
  void set_corked(bool) override {}  // nothing to do: ZeroMQ's I/O thread batches messages

  void reconnect() override {
    if (Result<void> connected = socket_->reconnect(); !connected) log().error("{}", connected.error().what);
  }
  bool has_broken() override { return false; }  // without a monitor, ZeroMQ reports no broken connection
  void linger(int ms) override { socket_->set_linger(ms); }

 private:
  net::ZmqPart part_;
  std::unique_ptr<net::ZmqSocket> socket_;
};

}  // namespace

Result<std::unique_ptr<ClientLink>> make_zmq_link(const std::string& endpoint, const LinkOptions& options) {
  if (options.zmq_context && !options.zmq_context->has_key(options.cluster_key)) {
    const char* const context_has = options.zmq_context->has_key({}) ? "none"
                                    : options.cluster_key            ? "another one"
                                                                     : "one";
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("the connection to {} is to use {} cluster key, but the ZeroMQ context that it shares with others "
                    "uses {}; both need the same key, or none",
                    endpoint, options.cluster_key ? "a" : "no", context_has)};
  }
  auto context = options.zmq_context
                     ? options.zmq_context
                     : std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, options.cluster_key);
  auto socket =
      net::ZmqSocket::make(std::move(context), net::ZmqKind::kDealer,
                           {.message_bytes_max = options.is_bounded ? std::int64_t{wire::kMessageBytesMax} : -1,
                            .send_queue_max = kSendQueueMax,
                            .connect_timeout_ms = kConnectTimeoutMs,
                            // A restarted controller must not receive messages meant for the earlier one.
                            .queues_unconnected = false});
  if (!socket) return std::move(socket).error();
  if (Result<void> connected = (*socket)->connect(endpoint); !connected) return std::move(connected).error();
  return std::unique_ptr<ClientLink>(std::make_unique<ZmqLink>(std::move(*socket)));
}

Result<std::unique_ptr<ClientLink>> make_link(const std::string& endpoint, const LinkOptions& options) {
  if (Result<void> checked = check_endpoint(endpoint, EndpointUse::kConnect); !checked)
    return std::move(checked).error();
  if (options.cluster_key) KVFERRY_TRY(check_for_cluster_key(endpoint));
  return is_stream(endpoint) ? make_stream_link(endpoint, options) : make_zmq_link(endpoint, options);
}

std::string_view cluster_key_hint(bool has_key) {
  return has_key
             ? "; this process has a cluster key: the controller must have the same key (cluster_key_file) and, "
               "if it is a member's, list the member"
             : "; this process has no cluster key: if the controller has one, set the same key here (cluster_key_file)";
}

}  // namespace kvferry::controller
