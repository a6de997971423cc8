// Makes a controller one of several replicas. Replicas share their endpoints, the nodes' incarnations and the quotas
// through etcd, and nodes' messages through an event log. Lookups use neither.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "controller/api/listener.h"
#include "controller/directory/sessions.h"
#include "controller/scale/url.h"

namespace kvferry::controller::scale {

struct ReplicaOptions {
  std::string name;
  std::string endpoint;   // address of this replica's listener for nodes
  std::uint64_t run = 0;  // must be higher at each start, e.g. the time in ms
  std::optional<EtcdUrl> etcd{};
  std::optional<RedisUrl> event_log{};
  std::int64_t lease_s = 5;
};

/// Returns a listener for the server. The listener also becomes the observer of `sessions`. Threads: the server's
/// thread uses it; the clients of etcd and Redis have threads of their own. If etcd is reachable, the destructor
/// revokes this replica's lease in etcd and waits up to 300 ms for the reply.
std::unique_ptr<Listener> make_replica(ReplicaOptions options, Sessions& sessions, TimeNs now);

}  // namespace kvferry::controller::scale
