// What makes a controller one of several: it shares the small truth by etcd, and what nodes said by an event log.
// Look-ups need neither.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "controller/api/listener.h"
#include "controller/scale/url.h"
#include "controller/directory/sessions.h"

namespace kvferry::controller::scale {

struct ReplicaOptions {
  std::string name;
  std::string endpoint;   // where nodes reach it
  std::uint64_t run = 0;  // higher at each start, e.g. the time of day in ms
  std::optional<EtcdUrl> etcd{};
  std::optional<RedisUrl> event_log{};
  std::int64_t lease_s = 5;
};

/// To be added to the server as a front. It hears what nodes say through sessions.set_observer(), which it unsets when it
/// goes. Threads: the server's, and those of the clients of etcd and Redis. The destructor takes up to 300 ms to say
/// goodbye, so that the others don't wait for its lease.
std::unique_ptr<Listener> make_replica(ReplicaOptions options, Sessions& sessions, TimeNs now);

}  // namespace kvferry::controller::scale
