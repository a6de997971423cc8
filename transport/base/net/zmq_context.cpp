#include "transport/base/net/zmq_context.h"

#include <zmq.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/net/without_signals.h"

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

bool leaves_the_host(std::string_view endpoint) { return endpoint.starts_with("tcp://"); }

Error no_curve() {
  return Error{ErrorCode::kUnavailable, "this libzmq was built without CURVE, which a cluster key needs"};
}

Error failed(const char* what) {
  return Error{ErrorCode::kUnavailable, fmt::format("cannot {}: {}", what, ::zmq_strerror(::zmq_errno()))};
}

bool set_text(void* socket, int option, const std::string& key) {
  return ::zmq_setsockopt(socket, option, key.c_str(), kTextBytes) == 0;
}

}  // namespace

ZmqContext::ZmqContext(int sockets_max, const std::optional<ClusterKey>& key) : handle_(::zmq_ctx_new()), key_(key) {
  KVFERRY_CHECK(handle_ != nullptr, "cannot create a ZeroMQ context: {}", ::zmq_strerror(::zmq_errno()));
  // While a client accepts two keys, it has a monitor, which takes two more sockets.
  ::zmq_ctx_set(handle_, ZMQ_MAX_SOCKETS, key_ ? 3 * sockets_max : sockets_max);
}

ZmqContext::~ZmqContext() {
  if (authenticator_.joinable()) {
    ::zmq_ctx_shutdown(handle_);
    authenticator_.join();
  }
  while (::zmq_ctx_term(handle_) != 0 && ::zmq_errno() == EINTR) continue;
}

bool ZmqContext::has_key(const std::optional<ClusterKey>& key) const { return key_ == key; }

std::vector<ZmqContext::CurveKeys> ZmqContext::curve_keys() const {
  std::vector<CurveKeys> pairs;
  if (!key_) return pairs;
  for (const ClusterKey& key : key_->accepted()) {
    const ClusterKey::Derived secret = key.derived(kCurvePurpose);
    char secret_text[kTextBytes] = "", public_text[kTextBytes] = "";
    ::zmq_z85_encode(secret_text, secret.data(), secret.size());
    if (::zmq_curve_public(public_text, secret_text) == 0) pairs.push_back({public_text, secret_text});
  }
  return pairs;
}

std::vector<std::string> ZmqContext::public_keys() const {
  std::vector<std::string> keys;
  for (CurveKeys& pair : curve_keys()) keys.push_back(std::move(pair.public_key));
  return keys;
}

Result<std::string> ZmqContext::secure_server(void* socket, std::string_view endpoint) {
  if (!key_ || !leaves_the_host(endpoint)) return std::string();
  const std::vector<CurveKeys> pairs = curve_keys();
  if (pairs.empty()) return no_curve();
  KVFERRY_TRY(start_authenticator());
  constexpr int kYes = 1;
  if (::zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &kYes, sizeof kYes) != 0 ||
      !set_text(socket, ZMQ_CURVE_SECRETKEY, pairs[0].secret_key) ||
      ::zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, kZapDomain, std::char_traits<char>::length(kZapDomain)) != 0)
    return failed("set the keys of a ZeroMQ socket");
  return pairs[0].public_key;
}

Result<std::string> ZmqContext::secure_client(void* socket, std::string_view endpoint, std::string_view former) {
  if (!key_ || !leaves_the_host(endpoint)) return std::string();
  const std::vector<CurveKeys> pairs = curve_keys();
  if (pairs.empty()) return no_curve();
  const auto tried = std::find_if(pairs.begin(), pairs.end(), [&](auto& pair) { return pair.public_key == former; });
  const CurveKeys& next = tried == pairs.end() || tried + 1 == pairs.end() ? pairs.front() : *(tried + 1);
  if (!set_text(socket, ZMQ_CURVE_SERVERKEY, next.public_key) ||
      !set_text(socket, ZMQ_CURVE_PUBLICKEY, next.public_key) ||
      !set_text(socket, ZMQ_CURVE_SECRETKEY, next.secret_key))
    return failed("set the keys of a ZeroMQ socket");
  return next.public_key;
}

/// Answers libzmq's authentication requests: accepts clients with the public key of an accepted cluster key. Returns
/// when the context ends.
void ZmqContext::authenticate(void* socket) const {
  // Parts of a request: version, request id, domain, address, identity, mechanism, credentials.
  constexpr std::size_t kNumParts = 7, kRequestId = 1, kMechanism = 5, kCredentials = 6;
  std::vector<std::string> members;
  std::uint64_t members_version = 0;
  for (;;) {
    const std::vector<std::string> asked = wait_parts(socket);
    if (asked.empty()) break;
    if (const std::uint64_t version = key_->version(); version != members_version) {
      members_version = version;
      members = public_keys();
      for (std::string& member : members) {
        std::string bytes(ClusterKey::Derived{}.size(), '\0');
        ::zmq_z85_decode(reinterpret_cast<std::uint8_t*>(bytes.data()), member.c_str());
        member = std::move(bytes);
      }
    }
    const bool is_member = asked.size() == kNumParts && asked[kMechanism] == "CURVE" &&
                           std::find(members.begin(), members.end(), asked[kCredentials]) != members.end();
    const std::array<std::string, 6> answer = {
        "1.0", asked.size() > kRequestId ? asked[kRequestId] : "", is_member ? "200" : "400", "", "", ""};
    for (std::size_t i = 0; i < answer.size(); ++i)
      ::zmq_send(socket, answer[i].data(), answer[i].size(), i + 1 < answer.size() ? ZMQ_SNDMORE : 0);
  }
  ::zmq_close(socket);
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
  authenticator_ = start_without_signals([this, socket] { authenticate(socket); });
  return {};
}

}  // namespace kvferry::net
