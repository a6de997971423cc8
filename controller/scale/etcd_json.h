// The requests and replies of etcd v3's JSON gateway. Pure.
#pragma once

#include <string>
#include <string_view>

#include "controller/scale/etcd_messages.h"

namespace kvferry::controller::scale {

struct HttpPost {
  std::string path;
  std::string body;
};

HttpPost post_of(const EtcdRequest& request);
/// Reads all keys that begin with `prefix`, or with `count_only` their number. Fails if the member has no leader.
HttpPost range_of(std::string_view prefix, bool count_only);
HttpPost watch_of(std::string_view prefix, std::int64_t from_revision);
HttpPost login_of(std::string_view user, std::string_view password);

/// Parses the body of a reply. kNotFound: no such lease; kRefused: not allowed, or malformed; kUnavailable: malformed
/// reply, or another member or a later attempt may succeed; kCancelled: the login has expired.
Result<EtcdReply> reply_of(const EtcdRequest& request, std::string_view body);
Result<EtcdAll> all_of(std::string_view body);
Result<std::string> token_of(std::string_view body);

struct WatchLine {
  bool is_cancelled = false;  // the member lost its leader, or the revision is compacted
  bool is_compacted = false;  // the revision is compacted: read everything again
  EtcdChanges changes{};
};
Result<WatchLine> watch_line_of(std::string_view line);

}  // namespace kvferry::controller::scale
