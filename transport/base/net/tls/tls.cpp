#include "transport/base/net/tls.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/net/tcp_socket.h"
#include "transport/base/net/tls/certificate.h"
#include "transport/base/net/tls/openssl_error.h"

namespace kvferry::net {
namespace {

constexpr std::string_view kPurpose = "kvferry TLS 1", kNamePurpose = "kvferry TLS name 1";
constexpr std::string_view kRefusedPurpose = "kvferry TLS refused 1";
constexpr std::size_t kNameBytes = 8;  // length of a key's name
constexpr const char* kCipher = "TLS_AES_128_GCM_SHA256";
constexpr std::array<std::uint8_t, 2> kCipherId = {0x13, 0x01};  // the number of kCipher in TLS messages
constexpr std::uint8_t kContext = 'k';  // session id context, which OpenSSL requires of a server that verifies clients
constexpr std::size_t kReadAheadBytes = 128 << 10;  // OpenSSL reads up to this many bytes at a time
// The connecting end sends an identity of its pre-shared key (PSK), whose first byte tells whether the connection stays
// encrypted. The name of the key follows if the connecting end accepts several keys. An end with one key leaves the
// name out, as old releases do, which have no key names; the byte alone means the key in use.
constexpr std::uint8_t kEncrypted = 'e', kClear = 'c';
// With a list of members, the connecting end sends kEncrypted or kClear as the name of an application protocol (ALPN)
// instead, after a byte with the name's length.
constexpr std::size_t kWantedBytes = 2;

TlsSession& session_of(BIO* bio) { return *static_cast<TlsSession*>(::BIO_get_data(bio)); }
TlsSession& session_of(SSL* ssl) { return *static_cast<TlsSession*>(SSL_get_app_data(ssl)); }

std::string name_of(const ClusterKey& key) {
  const ClusterKey::Derived name = key.derived(kNamePurpose);
  return {reinterpret_cast<const char*>(name.data()), kNameBytes};
}

}  // namespace

/// Callbacks for OpenSSL. They read the socket, queue bytes for flush() to write (OpenSSL's own writes may raise
/// SIGPIPE), name or find the cluster key, verify certificates, and choose encryption.
struct TlsCallbacks {
  static int read(BIO* bio, char* to, std::size_t bytes, std::size_t* got) {
    TlsSession& session = session_of(bio);
    ::BIO_clear_retry_flags(bio);
    // An unauthenticated peer may send only kHandshakeBytesMax bytes. OpenSSL does not read ahead during the handshake,
    // so bytes in clear text that follow the handshake stay in the socket.
    if (!session.is_done_) {
      bytes = std::min(bytes, TlsSession::kHandshakeBytesMax - session.handshake_bytes_);
      if (bytes == 0) return 0;
    }
    ssize_t count = 0;
    do count = ::recv(session.fd_, to, bytes, 0);
    while (count < 0 && errno == EINTR);
    if (count < 0 && errno == EAGAIN) ::BIO_set_retry_read(bio);
    session.is_at_end_ = count == 0;
    if (count <= 0) return 0;
    *got = static_cast<std::size_t>(count);
    if (!session.is_done_) session.handshake_bytes_ += *got;
    return 1;
  }
  static int write(BIO* bio, const char* from, std::size_t bytes, std::size_t* taken) {
    std::vector<std::byte>& out = session_of(bio).out_;
    const auto* const first = reinterpret_cast<const std::byte*>(from);
    out.insert(out.end(), first, first + bytes);
    *taken = bytes;
    return 1;
  }
  static long control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_EOF) return session_of(bio).is_at_end_ ? 1 : 0;
    return command == BIO_CTRL_FLUSH ? 1 : 0;
  }
  static const BIO_METHOD* methods() {
    static BIO_METHOD* const made = [] {
      BIO_METHOD* const one = ::BIO_meth_new(::BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "socket without SIGPIPE");
      KVFERRY_CHECK(one != nullptr, "OpenSSL has no memory for its table of socket functions");
      ::BIO_meth_set_read_ex(one, read);
      ::BIO_meth_set_write_ex(one, write);
      ::BIO_meth_set_ctrl(one, control);
      return one;
    }();
    return made;
  }

  static SSL_SESSION* make_session(SSL* ssl, const ClusterKey& cluster_key) {
    const ClusterKey::Derived key = cluster_key.derived(kPurpose);
    SSL_SESSION* const made = ::SSL_SESSION_new();
    if (made != nullptr && ::SSL_SESSION_set1_master_key(made, key.data(), key.size()) == 1 &&
        ::SSL_SESSION_set1_id_context(made, &kContext, sizeof kContext) == 1 &&
        ::SSL_SESSION_set_cipher(made, ::SSL_CIPHER_find(ssl, kCipherId.data())) == 1 &&
        ::SSL_SESSION_set_protocol_version(made, TLS1_3_VERSION) == 1)
      return made;
    ::SSL_SESSION_free(made);
    return nullptr;
  }
  static int name_key(SSL* ssl, const EVP_MD*, const unsigned char** name, std::size_t* name_bytes,
                      SSL_SESSION** made) {
    TlsSession& session = session_of(ssl);
    *made = nullptr;
    if (session.members_ != nullptr) return 1;
    session.encrypts_ = session.context_.wants_encryption(session.fd_);
    const std::vector<ClusterKey> keys = session.context_.key_.accepted_by_nodes();
    session.key_name_ = name_of(keys.front());
    session.identity_.assign(1, static_cast<char>(session.encrypts_ ? kEncrypted : kClear));
    if (keys.size() > 1) session.identity_ += session.key_name_;
    *name = reinterpret_cast<const unsigned char*>(session.identity_.data());
    *name_bytes = session.identity_.size();
    *made = make_session(ssl, keys.front());
    return *made != nullptr ? 1 : 0;
  }
  static int find_key(SSL* ssl, const unsigned char* name, std::size_t name_bytes, SSL_SESSION** made) {
    TlsSession& session = session_of(ssl);
    *made = nullptr;
    if (name_bytes == 0 || (*name != kEncrypted && *name != kClear)) return 1;
    // With a list of members no pre-shared key is accepted: OpenSSL gets a key that no peer has, so that the handshake
    // fails as with a wrong key.
    if (session.members_ != nullptr) {
      const Bytes32 unknown = derive(text_of(session.members_->own_certificate()), kRefusedPurpose);
      *made = make_session(ssl, ClusterKey(std::string(text_of(unknown))));
      return *made != nullptr ? 1 : 0;
    }
    if (*name == kClear && session.context_.wants_encryption(session.fd_)) return 1;
    const std::string_view wanted(reinterpret_cast<const char*>(name) + 1, name_bytes - 1);
    for (const ClusterKey& key : session.context_.key_.accepted_by_nodes()) {
      session.key_name_ = name_of(key);
      if (!wanted.empty() && wanted != session.key_name_) continue;
      session.encrypts_ = *name == kEncrypted;
      *made = make_session(ssl, key);
      return *made != nullptr ? 1 : 0;
    }
    return 1;
  }

  /// Called with the peer's certificate in place of OpenSSL's search for its signer.
  static int verify(X509_STORE_CTX* asked, void*) {
    auto* const ssl = static_cast<SSL*>(::X509_STORE_CTX_get_ex_data(asked, ::SSL_get_ex_data_X509_STORE_CTX_idx()));
    TlsSession& session = session_of(ssl);
    const std::string key = key_in_certificate(asked);
    if (session.members_ == nullptr || key.empty()) return 0;
    const std::vector<std::string> accepted = session.context_.key_names();
    if (std::find(accepted.begin(), accepted.end(), key) == accepted.end()) return 0;
    session.key_name_ = key;
    return 1;
  }
  /// Called at the accepting end with TLS's list of application protocols (ALPN), in which the connecting end says
  /// whether it wants encryption.
  static int choose(SSL* ssl, const unsigned char** chosen, unsigned char* bytes, const unsigned char* wanted,
                    unsigned wanted_bytes, void*) {
    const TlsSession& session = session_of(ssl);
    if (wanted_bytes != kWantedBytes || wanted[0] != 1 || (wanted[1] != kEncrypted && wanted[1] != kClear) ||
        (wanted[1] == kClear && session.context_.wants_encryption(session.fd_)))
      return SSL_TLSEXT_ERR_ALERT_FATAL;
    *chosen = wanted + 1;
    *bytes = 1;
    return SSL_TLSEXT_ERR_OK;
  }
};

std::optional<Encrypt> parse_encrypt(std::string_view name) {
  const auto found = std::find(kEncryptNames.begin(), kEncryptNames.end(), name);
  if (found == kEncryptNames.end()) return std::nullopt;
  return static_cast<Encrypt>(found - kEncryptNames.begin());
}

TlsContext::TlsContext(const ClusterKey& key, Encrypt encrypt)
    : handle_(::SSL_CTX_new(::TLS_method())), key_(key), encrypt_(encrypt) {
  KVFERRY_CHECK(handle_ != nullptr && ::SSL_CTX_set_min_proto_version(handle_, TLS1_3_VERSION) == 1 &&
                    ::SSL_CTX_set_ciphersuites(handle_, kCipher) == 1 &&
                    ::SSL_CTX_set1_groups_list(handle_, "X25519") == 1 && ::SSL_CTX_set_num_tickets(handle_, 0) == 1,
                "OpenSSL cannot set up TLS 1.3 with {} and X25519: {}", kCipher, openssl_error("it gave no reason"));
  // A peer without the key could offer a certificate instead. TlsCallbacks::verify() accepts certificates only if there
  // is a list of members, and then only those whose public key is in KeyContent::node_certificates().
  ::SSL_CTX_set_verify(handle_, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  ::SSL_CTX_set_session_id_context(handle_, &kContext, sizeof kContext);
  ::SSL_CTX_set_session_cache_mode(handle_, SSL_SESS_CACHE_OFF);
  ::SSL_CTX_set_options(handle_, SSL_OP_NO_TICKET | SSL_OP_IGNORE_UNEXPECTED_EOF);
  ::SSL_CTX_set_psk_use_session_callback(handle_, TlsCallbacks::name_key);
  ::SSL_CTX_set_psk_find_session_callback(handle_, TlsCallbacks::find_key);
  ::SSL_CTX_set_cert_verify_callback(handle_, TlsCallbacks::verify, nullptr);
  ::SSL_CTX_set_alpn_select_cb(handle_, TlsCallbacks::choose, nullptr);
}

TlsContext::~TlsContext() { ::SSL_CTX_free(handle_); }

std::vector<std::string> TlsContext::key_names() const {
  if (const auto content = key_.content(); content->members) return content->node_certificates();
  std::vector<std::string> names;
  for (const ClusterKey& key : key_.accepted_by_nodes()) names.push_back(name_of(key));
  return names;
}

std::optional<std::string> TlsContext::member_of(std::string_view key_name) const {
  const auto content = key_.content();
  if (!content->members) return std::nullopt;
  for (const Member& member : *content->members)
    if (text_of(member.certificate) == key_name) return member.identity.name;
  return "";
}

std::string TlsContext::key_in_use() const {
  return key_.content()->members ? "" : name_of(key_.accepted_by_nodes().front());
}

bool TlsContext::wants_encryption(int fd) const {
  if (encrypt_ == Encrypt::kBetweenHosts) return local_address(fd).host != peer_address(fd).host;
  return encrypt_ == Encrypt::kAlways;
}

TlsSession::TlsSession(const TlsContext& context, int fd, bool is_server)
    : context_(context),
      fd_(fd),
      is_server_(is_server),
      members_(context.key_.content()->members ? context.key_.content() : nullptr),
      ssl_(::SSL_new(context.handle_)) {
  BIO* const bio = ::BIO_new(TlsCallbacks::methods());
  KVFERRY_CHECK(ssl_ != nullptr && bio != nullptr, "OpenSSL has no memory for another TLS session");
  ::BIO_set_data(bio, this);
  ::BIO_set_init(bio, 1);
  ::SSL_set_bio(ssl_, bio, bio);
  SSL_set_app_data(ssl_, this);
  ::SSL_set_default_read_buffer_len(ssl_, kReadAheadBytes);
  is_server ? ::SSL_set_accept_state(ssl_) : ::SSL_set_connect_state(ssl_);
}

TlsSession::~TlsSession() { ::SSL_free(ssl_); }

void TlsSession::prepare_certificate() {
  use_certificate(ssl_, members_->own_certificate());
  if (is_server_) return;
  const std::array<std::uint8_t, kWantedBytes> wanted = {
      1, context_.wants_encryption(fd_) ? kEncrypted : kClear};  // ALPN list that has one name, of one byte
  ::SSL_set_alpn_protos(ssl_, wanted.data(), wanted.size());
}

bool TlsSession::has_proof() {
  // OpenSSL counts a handshake with the cluster key as a reused session.
  if (members_ == nullptr) return ::SSL_session_reused(ssl_) == 1;
  const unsigned char* chosen = nullptr;
  unsigned bytes = 0;
  ::SSL_get0_alpn_selected(ssl_, &chosen, &bytes);
  if (bytes != 1 || key_name_.empty()) return false;
  encrypts_ = *chosen == kEncrypted;
  return encrypts_ || !context_.wants_encryption(fd_);
}

Result<bool> TlsSession::handshake() {
  ::ERR_clear_error();
  if (!std::exchange(is_begun_, true) && members_ != nullptr) prepare_certificate();
  const int code = ::SSL_do_handshake(ssl_);
  const bool waits = code != 1 && ::SSL_get_error(ssl_, code) == SSL_ERROR_WANT_READ;
  const bool is_flushed = flush();  // if the handshake failed, this sends OpenSSL's alert to the peer
  if (!is_flushed && (code == 1 || waits) && errno == EAGAIN) return false;
  if (!is_flushed && (code == 1 || waits))
    return Error{ErrorCode::kPeerLost,
                 fmt::format("the connection broke during the TLS handshake: {}", std::strerror(errno))};
  if (waits) return false;
  if (code != 1 || !has_proof())
    return Error{ErrorCode::kRefused,
                 fmt::format("{}, or the setting encrypt_tcp differs between the two sides (TLS reports: {})",
                             members_ == nullptr ? "the peer has no cluster key or a different one"
                                                 : "the peer is not a member with the role worker or admin",
                             openssl_error(code == 1 ? "a handshake without proof" : "the connection ended"))};
  is_done_ = true;
  if (encrypts_) ::SSL_set_read_ahead(ssl_, 1);
  return true;
}

}  // namespace kvferry::net
