// Requests to etcd and events from etcd, as C++ values and as JSON for the gateway of etcd v3. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::controller::scale {

/// A key and its value. `mod_revision`: revision of the key's last change; in a request, 0 means that the key must not
/// exist.
struct EtcdPair {
  std::string key;
  std::string value;
  std::int64_t mod_revision = 0;
  std::int64_t lease = 0;  // id of the lease that the key is bound to; 0: none
};

// Requests. Keys are complete, including the prefix.
struct EtcdGrant {
  std::int64_t ttl_s = 0;
};
struct EtcdKeepAlive {
  std::int64_t lease = 0;
};
/// Revokes a lease, which also erases all keys that were put with it.
struct EtcdRevoke {
  std::int64_t lease = 0;
};
/// Sets a key's value, but only if the key's last change was at pair.mod_revision.
struct EtcdPut {
  EtcdPair pair;
};
/// Erases a key, but only if the key's last change was at `mod_revision`.
struct EtcdErase {
  std::string key;
  std::int64_t mod_revision = 0;
};
using EtcdRequest = std::variant<EtcdGrant, EtcdKeepAlive, EtcdRevoke, EtcdPut, EtcdErase>;

/// The reply to one request. `error`: kNotFound: the lease does not exist; kRefused: etcd refused the request; kFull:
/// the request was not sent. After any other error, the request may or may not have been executed.
struct EtcdReply {
  std::uint64_t token = 0;
  std::optional<Error> error{};
  bool done = true;                 // false: a put or erase found another mod_revision, see `found`
  std::int64_t revision = 0;        // revision of etcd after the request
  std::int64_t lease = 0;           // id of the lease that was granted or kept alive
  std::int64_t ttl_s = 0;           // remaining time of the lease; 0: expired
  std::optional<EtcdPair> found{};  // if `done` is false: the pair in etcd; none: the key does not exist
};
/// All watched keys at `revision`; later changes follow.
struct EtcdAll {
  std::vector<EtcdPair> pairs;
  std::int64_t revision = 0;
};
struct EtcdErased {
  std::string key;
  std::int64_t revision = 0;
};
struct EtcdChanges {
  std::vector<std::variant<EtcdPair, EtcdErased>> changes;  // in the order in which etcd made them
};
/// The watch is interrupted: changes may be missed until the next EtcdAll.
struct EtcdLost {
  std::string reason;
};
using EtcdEvent = std::variant<EtcdReply, EtcdAll, EtcdChanges, EtcdLost>;

struct HttpPost {
  std::string path;
  std::string body;
};

HttpPost post_of(const EtcdRequest& request);
/// Returns a request for all keys that begin with `prefix`, or, with `count_only`, for the number of these keys. The
/// request fails if the member of etcd has no leader.
HttpPost range_of(std::string_view prefix, bool count_only);
HttpPost watch_of(std::string_view prefix, std::int64_t from_revision);
HttpPost login_of(std::string_view user, std::string_view password);

/// Parses the body of a reply. kNotFound: the lease does not exist; kRefused: the request is malformed or not allowed;
/// kUnavailable: the reply is malformed, or another member or a later attempt may succeed; kCancelled: the login has
/// expired.
Result<EtcdReply> reply_of(const EtcdRequest& request, std::string_view body);
Result<EtcdAll> all_of(std::string_view body);
Result<std::string> token_of(std::string_view body);

struct WatchLine {
  bool is_cancelled = false;  // etcd ended the watch, e.g. because its member lost its leader
  bool is_compacted = false;  // the revision to watch from is compacted, so everything must be read again
  EtcdChanges changes{};
};
Result<WatchLine> watch_line_of(std::string_view line);

}  // namespace kvferry::controller::scale
