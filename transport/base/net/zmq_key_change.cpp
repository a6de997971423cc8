// What ZeroMQ sockets do when the cluster key is replaced.
#include <zmq.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "transport/base/log.h"
#include "transport/base/net/zmq_socket.h"

namespace kvferry::net {

void ZmqSocket::follow_key(bool was_refused) {
  const std::uint64_t version = context_->key_version();
  if (is_router_) {
    if (is_unbound_ || version != key_version_) listen_again(version);
    return;
  }
  constexpr TimeNs kTryAfterNs = 100 * kMillisecond;  // least time between attempts if a server accepts neither key
  const TimeNs now = was_refused ? SteadyClock().now() : 0;
  const bool tries_other = was_refused && now - changed_at_ >= kTryAfterNs;
  if (version == key_version_ && !tries_other) return;
  key_version_ = version;
  const std::vector<std::string> accepted = context_->public_keys();
  if (accepted.size() == 1) {
    connections_.reset();
  } else if (!connections_) {
    if (Result<void> watching = start_watching(0); !watching)
      log().error(
          "cannot watch the connection to {} for refusals of the cluster key, so the other accepted key will not be "
          "tried: {}",
          endpoint_, watching.error().what);
  }
  const bool is_accepted = std::find(accepted.begin(), accepted.end(), key_) != accepted.end();
  if (is_accepted && !(tries_other && accepted.size() > 1)) return;
  if (tries_other) changed_at_ = now;
  ::zmq_disconnect(handle_, endpoint_.c_str());
  Result<std::string> key = context_->secure_client(handle_, endpoint_, key_);
  if (key) key_ = *std::move(key);
  if (Result<void> connected = connect_again(); !connected)
    log().error("after a change of the cluster key: {}", connected.error().what);
}

void ZmqSocket::listen_again(std::uint64_t version) {
  constexpr TimeNs kPatienceNs = kSecond, kNever = std::numeric_limits<TimeNs>::max();
  key_version_ = version;
  if (!is_unbound_ && context_->public_keys().front() == key_) return;
  const TimeNs now = SteadyClock().now();
  if (!std::exchange(is_unbound_, true)) {
    ::zmq_unbind(handle_, endpoint_.c_str());  // this also ends the connections that were made with the former key
    changed_at_ = now;
  }
  Result<std::string> key = context_->secure_server(handle_, endpoint_);
  if (key) key_ = *key;
  // zmq_bind() fails until ZeroMQ's thread has closed the former listening socket; the next call tries again.
  is_unbound_ = !key || ::zmq_bind(handle_, endpoint_.c_str()) != 0;
  if (!is_unbound_ || changed_at_ == kNever || now - changed_at_ < kPatienceNs) return;
  log().error("cannot listen on {} with the new cluster key and will try again: {}", endpoint_,
              key ? ::zmq_strerror(::zmq_errno()) : key.error().what);
  changed_at_ = kNever;
}

}  // namespace kvferry::net
