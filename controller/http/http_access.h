// Who may ask what over HTTP. With a cluster key, clients show a token that is derived from the key.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/base/net/cluster_key.h"

namespace kvferry::controller {

/// Each role may do what the roles before it may do.
enum class HttpRole : std::uint8_t {
  kNone,    // GET /healthz
  kReader,  // all other GET requests, and questions about prompts
  kAdmin,   // everything; POST /register makes the controller connect to an address
};

/// Returns the token of kReader or kAdmin: 64 hexadecimal digits.
std::string http_token(const net::ClusterKey& key, HttpRole role);

struct HttpRefusal {
  int status = 0;
  std::string why;  // a sentence
};

/// Threads: any.
class HttpAccess {
 public:
  /// Without a key every client is an admin.
  explicit HttpAccess(const std::optional<net::ClusterKey>& key);

  /// Returns nullopt if the request is allowed. `authorization`: the header of that name, or empty. A token counts as
  /// "Bearer TOKEN", and also as the password of Basic, which browsers send, where that reads: a foreign page can make
  /// a browser send Basic with requests of its own.
  std::optional<HttpRefusal> refusal(std::string_view method, std::string_view path,
                                     std::string_view authorization) const;
  /// Returns false if a request with a body is refused whatever it asks.
  bool may_send_body(std::string_view authorization) const {
    return is_open_ || role_of("POST", authorization) != HttpRole::kNone;
  }

 private:
  HttpRole role_with(std::string_view token) const;
  HttpRole role_of(std::string_view method, std::string_view authorization) const;

  bool is_open_;
  std::string reader_, admin_;
};

}  // namespace kvferry::controller
