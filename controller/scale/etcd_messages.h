// What is asked of etcd, and what it answers, without its socket.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "transport/base/result.h"

namespace kvferry::controller::scale {

/// A key and its value. `mod_revision` is of its last change; 0 where a request means "if there is none".
struct EtcdPair {
  std::string key;
  std::string value;
  std::int64_t mod_revision = 0;
  std::int64_t lease = 0;  // 0: none
};

// Requests. Keys go as they are; what all of them begin with is the owner's business.
struct EtcdGrant {
  std::int64_t ttl_s = 0;
};
struct EtcdKeepAlive {
  std::int64_t lease = 0;
};
/// What was put with the lease goes with it.
struct EtcdRevoke {
  std::int64_t lease = 0;
};
/// Only if the key's last change was at pair.mod_revision.
struct EtcdPut {
  EtcdPair pair;
};
struct EtcdErase {
  std::string key;
  std::int64_t mod_revision = 0;
};
using EtcdRequest = std::variant<EtcdGrant, EtcdKeepAlive, EtcdRevoke, EtcdPut, EtcdErase>;

/// To one request, by its token. After an error other than kNotFound (of a lease), kRefused and kFull (it was not sent)
/// nobody knows whether it was done.
struct EtcdReply {
  std::uint64_t token = 0;
  std::optional<Error> error{};
  bool done = true;                 // false: a put or erase found another mod_revision, see `found`
  std::int64_t revision = 0;        // at which it was done
  std::int64_t lease = 0;           // granted or kept alive
  std::int64_t ttl_s = 0;           // what is left of it; 0: it ran out
  std::optional<EtcdPair> found{};  // what stands there in place of what was expected; none: no such key
};
/// Everything that is watched, as it stood at `revision`; changes after it follow.
struct EtcdAll {
  std::vector<EtcdPair> pairs;
  std::int64_t revision = 0;
};
struct EtcdErased {
  std::string key;
  std::int64_t revision = 0;
};
struct EtcdChanges {
  std::vector<std::variant<EtcdPair, EtcdErased>> changes;  // in order
};
/// What is watched may change unseen from here on; EtcdAll tells when it is seen again.
struct EtcdLost {
  std::string reason;
};
using EtcdEvent = std::variant<EtcdReply, EtcdAll, EtcdChanges, EtcdLost>;

}  // namespace kvferry::controller::scale
