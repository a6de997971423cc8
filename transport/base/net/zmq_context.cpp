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
  return Error{ErrorCode::kUnavailable,
               "the libzmq of this process was built without CURVE encryption, which cluster_key_file needs; install a "
               "libzmq that has it"};
}

Error failed(const char* what) {
  return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", what, ::zmq_strerror(::zmq_errno()))};
}

std::string z85_of(const Bytes32& key) {
  char text[kTextBytes] = "";
  ::zmq_z85_encode(text, key.data(), key.size());
  return text;
}

bool set_text(void* socket, int option, const std::string& key) {
  return ::zmq_setsockopt(socket, option, key.c_str(), kTextBytes) == 0;
}

}  // namespace

ZmqContext::ZmqContext(int sockets_max, const std::optional<ClusterKey>& key, Servers servers)
    : handle_(::zmq_ctx_new()), key_(key), servers_(servers) {
  KVFERRY_CHECK(handle_ != nullptr, "cannot create a ZeroMQ context: {}", ::zmq_strerror(::zmq_errno()));
  // Each socket may have a monitor, which takes two more sockets. The authenticator takes one.
  ::zmq_ctx_set(handle_, ZMQ_MAX_SOCKETS, 3 * sockets_max + 1);
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
  std::vector<CurveKeys> all;
  if (!key_ || ::zmq_has("curve") == 0) return all;
  const std::shared_ptr<const KeyContent> content = key_->content();
  const std::vector<std::string> node_secrets = content->node_secrets();
  for (std::size_t i = 0; i < node_secrets.size(); ++i) {
    const std::optional<MemberKey>& own = content->own;
    const Bytes32 secret = own ? own->curve_secret() : curve_secret(content->keys[i]);
    CurveKeys& keys = all.emplace_back();
    keys.own_public = z85_of(curve_public(secret));
    keys.own_secret = z85_of(secret);
    if (servers_ == Servers::kControllers && own) {
      keys.server_public = z85_of(own->shared[i].controller);
      continue;
    }
    const Bytes32 of_server = servers_ == Servers::kControllers ? secret : curve_secret(node_secrets[i]);
    keys.server_public = z85_of(curve_public(of_server));
    keys.server_secret = z85_of(of_server);
  }
  return all;
}

std::vector<std::string> ZmqContext::public_keys() const {
  std::vector<std::string> keys;
  for (CurveKeys& one : curve_keys()) keys.push_back(std::move(one.server_public));
  return keys;
}

std::optional<Identity> ZmqContext::identity_of(std::string_view user_id) const {
  std::optional<Identity> known = key_ ? key_->identity_of(user_id) : Identity{};
  return known && servers_ == Servers::kNodes && known->role < Role::kWorker ? std::nullopt : known;
}

Result<std::string> ZmqContext::secure_server(void* socket, std::string_view endpoint) {
  if (!key_ || !leaves_the_host(endpoint)) return std::string();
  const std::vector<CurveKeys> keys = curve_keys();
  if (keys.empty()) return no_curve();
  if (keys[0].server_secret.empty())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("a controller needs the cluster key itself, but cluster_key_file has the key of {}; set "
                             "cluster_key_file to the file with the cluster key of the deployment",
                             key_->own_identity().str())};
  KVFERRY_TRY(start_authenticator());
  constexpr int kYes = 1;
  if (::zmq_setsockopt(socket, ZMQ_CURVE_SERVER, &kYes, sizeof kYes) != 0 ||
      !set_text(socket, ZMQ_CURVE_SECRETKEY, keys[0].server_secret) ||
      ::zmq_setsockopt(socket, ZMQ_ZAP_DOMAIN, kZapDomain, std::char_traits<char>::length(kZapDomain)) != 0)
    return failed(fmt::format("cannot set the keys of the ZeroMQ socket for {}", endpoint).c_str());
  return keys[0].server_public;
}

Result<std::string> ZmqContext::secure_client(void* socket, std::string_view endpoint, std::string_view former) {
  if (!key_ || !leaves_the_host(endpoint)) return std::string();
  const std::vector<CurveKeys> keys = curve_keys();
  if (keys.empty()) return no_curve();
  const auto tried = std::find_if(keys.begin(), keys.end(), [&](auto& one) { return one.server_public == former; });
  const CurveKeys& next = tried == keys.end() || tried + 1 == keys.end() ? keys.front() : *(tried + 1);
  if (!set_text(socket, ZMQ_CURVE_SERVERKEY, next.server_public) ||
      !set_text(socket, ZMQ_CURVE_PUBLICKEY, next.own_public) ||
      !set_text(socket, ZMQ_CURVE_SECRETKEY, next.own_secret))
    return failed(fmt::format("cannot set the keys of the ZeroMQ socket for {}", endpoint).c_str());
  return next.server_public;
}

/// Answers libzmq's authentication requests: accepts clients that identity_of() knows. Returns when the context ends.
void ZmqContext::authenticate(void* socket) const {
  // Parts of a request: version, request id, domain, address, identity, mechanism, credentials.
  constexpr std::size_t kNumParts = 7, kRequestId = 1, kMechanism = 5, kCredentials = 6;
  for (;;) {
    const std::vector<std::string> asked = wait_parts(socket);
    if (asked.empty()) break;
    const std::string user_id = asked.size() == kNumParts ? hex_of(asked[kCredentials]) : "";
    const bool is_member = !user_id.empty() && asked[kMechanism] == "CURVE" && identity_of(user_id);
    // ZeroMQ's client tries again after status 300, but not after 400. It has to try again, because this process may
    // read the list with a new member only after that member has started.
    const std::array<std::string, 6> answer = {
        "1.0", asked.size() > kRequestId ? asked[kRequestId] : "", is_member ? "200" : "300", "", user_id, ""};
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
    const Error error = failed("cannot start the authentication of ZeroMQ clients");
    if (socket != nullptr) ::zmq_close(socket);
    return error;
  }
  authenticator_ = start_without_signals([this, socket] { authenticate(socket); });
  return {};
}

}  // namespace kvferry::net
