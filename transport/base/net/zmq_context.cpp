#include "transport/base/net/zmq_context.h"

#include <pthread.h>
#include <zmq.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <vector>

#include "transport/base/check.h"

namespace kvferry::net {
namespace {

constexpr std::string_view kCurvePurpose = "kvferry CURVE 1";
constexpr const char* kZapEndpoint = "inproc://zeromq.zap.01";  // libzmq sends authentication requests here (RFC 27)
constexpr const char* kZapDomain = "kvferry";
constexpr std::size_t kTextBytes = 41;  // size of a 32-byte key in Z85, with the final zero

/// Waits for a message and returns its parts, or nothing if the context is being ended.
std::vector<std::string> wait_parts(void* socket) {
  std::vector<std::string> parts;
  zmq_msg_t part;
  ::zmq_msg_init(&part);
  for (bool has_more = true; has_more;) {
    if (::zmq_msg_recv(&part, socket, 0) < 0) {
      if (::zmq_errno() == EINTR) continue;
      parts.clear();
      break;
    }
    parts.emplace_back(static_cast<const char*>(::zmq_msg_data(&part)), ::zmq_msg_size(&part));
    has_more = ::zmq_msg_more(&part) != 0;
  }
  ::zmq_msg_close(&part);
  return parts;
}

/// Answers libzmq's authentication requests: accepts clients with the public key `member`. Returns when the context
/// ends.
void authenticate(void* socket, const std::string& member) {
  // Parts of a request: version, request id, domain, address, identity, mechanism, credentials.
  constexpr std::size_t kNumParts = 7, kRequestId = 1, kMechanism = 5, kCredentials = 6;
  for (;;) {
    const std::vector<std::string> asked = wait_parts(socket);
    if (asked.empty()) break;
    const bool is_member = asked.size() == kNumParts && asked[kMechanism] == "CURVE" && asked[kCredentials] == member;
    const std::array<std::string, 6> answer = {
        "1.0", asked.size() > kRequestId ? asked[kRequestId] : "", is_member ? "200" : "400", "", "", ""};
    for (std::size_t i = 0; i < answer.size(); ++i)
      ::zmq_send(socket, answer[i].data(), answer[i].size(), i + 1 < answer.size() ? ZMQ_SNDMORE : 0);
  }
  ::zmq_close(socket);
}

/// Starts a thread that no signal interrupts, because the process's own threads handle signals.
template <class Body>
std::thread without_signals(Body body) {
  sigset_t all, before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread started(std::move(body));
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

bool leaves_the_host(std::string_view endpoint) { return endpoint.starts_with("tcp://"); }

Error no_curve() {
  return Error{ErrorCode::kUnavailable, "this libzmq was built without CURVE, which a cluster key needs"};
}

Error failed(const char* what) {
  return Error{ErrorCode::kUnavailable, fmt::format("cannot {}: {}", what, ::zmq_strerror(::zmq_errno()))};
}

std::optional<ClusterKey::Derived> derived_from(const std::optional<ClusterKey>& key) {
  if (!key) return std::nullopt;
  return key->derived(kCurvePurpose);
}

}  // namespace

ZmqContext::ZmqContext(int sockets_max, const std::optional<ClusterKey>& key)
    : handle_(::zmq_ctx_new()), secret_(derived_from(key)) {
  KVFERRY_CHECK(handle_ != nullptr, "cannot create a ZeroMQ context: {}", ::zmq_strerror(::zmq_errno()));
  ::zmq_ctx_set(handle_, ZMQ_MAX_SOCKETS, sockets_max);
  if (!secret_) return;
  char secret_text[kTextBytes] = "", public_text[kTextBytes] = "";
  ::zmq_z85_encode(secret_text, secret_->data(), secret_->size());
  if (::zmq_curve_public(public_text, secret_text) == 0) keys_ = CurveKeys{public_text, secret_text};
}

ZmqContext::~ZmqContext() {
  if (authenticator_.joinable()) {
    ::zmq_ctx_shutdown(handle_);
    authenticator_.join();
  }
  while (::zmq_ctx_term(handle_) != 0 && ::zmq_errno() == EINTR) continue;
}

bool ZmqContext::has_key(const std::optional<ClusterKey>& key) const { return secret_ == derived_from(key); }

Result<void> ZmqContext::secure_server(void* socket, std::string_view endpoint) {
  if (!secret_ || !leaves_the_host(endpoint)) return {};
  if (!keys_) return no_curve();
  KVFERRY_TRY(start_authenticator());
  constexpr int kYes = 1;
  if (::zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &kYes, sizeof kYes) != 0 ||
      ::zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys_->secret_key.c_str(), kTextBytes) != 0 ||
      ::zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, kZapDomain, std::char_traits<char>::length(kZapDomain)) != 0)
    return failed("set the keys of a ZeroMQ socket");
  return {};
}

Result<void> ZmqContext::secure_client(void* socket, std::string_view endpoint) {
  if (!secret_ || !leaves_the_host(endpoint)) return {};
  if (!keys_) return no_curve();
  if (::zmq_setsockopt(socket, ZMQ_CURVE_SERVERKEY, keys_->public_key.c_str(), kTextBytes) != 0 ||
      ::zmq_setsockopt(socket, ZMQ_CURVE_PUBLICKEY, keys_->public_key.c_str(), kTextBytes) != 0 ||
      ::zmq_setsockopt(socket, ZMQ_CURVE_SECRETKEY, keys_->secret_key.c_str(), kTextBytes) != 0)
    return failed("set the keys of a ZeroMQ socket");
  return {};
}

Result<void> ZmqContext::start_authenticator() {
  const std::lock_guard lock(mutex_);
  if (authenticator_.joinable()) return {};
  void* const socket = ::zmq_socket(handle_, ZMQ_REP);
  if (socket == nullptr || ::zmq_bind(socket, kZapEndpoint) != 0) {
    const Error error = failed("start the authentication of ZeroMQ clients");
    if (socket != nullptr) ::zmq_close(socket);
    return error;
  }
  std::string member(ClusterKey::Derived{}.size(), '\0');
  ::zmq_z85_decode(reinterpret_cast<std::uint8_t*>(member.data()), keys_->public_key.c_str());
  authenticator_ = without_signals([socket, member] { authenticate(socket, member); });
  return {};
}

}  // namespace kvferry::net
