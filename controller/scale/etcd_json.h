// etcd v3's JSON gateway: requests as it wants them, answers as it writes them. Pure.
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
/// All keys that begin with `prefix`; `count_only`: only how many, which shows that the member still hears the others.
HttpPost range_of(std::string_view prefix, bool count_only);
HttpPost watch_of(std::string_view prefix, std::int64_t from_revision);
HttpPost login_of(std::string_view user, std::string_view password);

/// What the body of an answer says; an error where it tells of one or is not understood. kNotFound: no such lease;
/// kRefused: not allowed, or malformed; kUnavailable: another member, or a later moment, may do better;
/// kCancelled: the login is not valid any more.
Result<EtcdReply> reply_of(const EtcdRequest& request, std::string_view body);
Result<EtcdAll> all_of(std::string_view body);
Result<std::string> token_of(std::string_view body);

struct WatchLine {
  bool is_cancelled = false;  // the member lost its leader, or is compacted
  bool is_compacted = false;  // what was asked for is gone: everything has to be read
  EtcdChanges changes{};
};
Result<WatchLine> watch_line_of(std::string_view line);

}  // namespace kvferry::controller::scale
