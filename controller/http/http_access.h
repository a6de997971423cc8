// Which HTTP requests a client may send. With a cluster key, clients need a token for all requests but GET and HEAD
// /healthz.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "transport/base/net/cluster_key.h"

namespace kvferry::controller {

/// Rights of an HTTP client. Each role includes the rights of the roles before it.
enum class HttpRole : std::uint8_t {
  kNone,    // may send GET and HEAD /healthz
  kReader,  // may send all GET and HEAD requests, and the POST requests that only ask about a prompt
  kAdmin,   // may send all requests; POST /register, for example, makes the controller connect to an address
};

/// Returns the token that gives a client `role`, which is kReader or kAdmin: 64 hexadecimal digits that are derived
/// from the key in use in `key` (see ClusterKey).
std::string http_token(const net::ClusterKey& key, HttpRole role);

struct HttpRefusal {
  int status = 0;
  std::string why;  // the reason, as a sentence for the client
};

/// Decides which requests the clients may send. The token of a member of the deployment gives kAdmin if the member's
/// role is admin, else kReader. Threads: any.
class HttpAccess {
 public:
  /// Without a key every client is an admin.
  explicit HttpAccess(std::optional<net::ClusterKey> key) : key_(std::move(key)) {}

  /// Returns nullopt if the request is allowed. `authorization`: value of the Authorization header, or empty. The token
  /// may come as "Bearer TOKEN". For GET and HEAD, browsers may also send it as the password of Basic authentication.
  /// For POST this is not allowed, because another site's page can make a browser send Basic credentials with a POST
  /// request.
  std::optional<HttpRefusal> refusal(std::string_view method, std::string_view path,
                                     std::string_view authorization) const;
  /// Returns false if a POST request with this Authorization header is refused for every path.
  bool may_send_body(std::string_view authorization) const {
    return !key_ || role_of("POST", authorization) != HttpRole::kNone;
  }

 private:
  HttpRole role_with(std::string_view token) const;
  HttpRole role_of(std::string_view method, std::string_view authorization) const;

  const std::optional<net::ClusterKey> key_;
};

}  // namespace kvferry::controller
