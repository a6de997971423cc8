// A client of etcd v3 that never blocks its owner. Two threads use etcd's JSON gateway: one sends requests, the other
// watches keys. If a member of the etcd cluster does not answer, the thread that uses it switches to the next member.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/scale/etcd_messages.h"
#include "controller/scale/url.h"

namespace kvferry::controller::scale {

struct EtcdOptions {
  EtcdUrl url;
  std::string watched_prefix;         // prefix of the watched keys
  std::int64_t connect_ms = 1000;     // timeout of a connection attempt
  std::int64_t request_ms = 2000;     // timeout of a reply
  std::int64_t quiet_ms = 5000;       // without a change for this long, the watcher checks that the member has a leader
  std::int64_t retry_ms_max = 2000;   // longest pause between attempts to watch; the first is 100 ms, then it doubles
  std::size_t requests_max = 1024;    // limit on waiting requests
  std::size_t bytes_max = 64U << 20;  // limit on a reply's size
};

/// A connection to an etcd cluster. Threads: one owner makes all calls.
class Etcd {
 public:
  virtual ~Etcd() = default;

  /// Returns a file descriptor that is readable while events wait.
  virtual int fd() const = 0;
  /// Queues a request; never blocks. Requests are sent in order; each one gets exactly one EtcdReply with its token.
  virtual void ask(std::uint64_t token, EtcdRequest request) = 0;
  /// Takes up to `num_max` events, and all replies with kFull. After EtcdAll, each change arrives once and in order,
  /// until EtcdLost or the next EtcdAll.
  virtual std::vector<EtcdEvent> take(std::size_t num_max) = 0;
};

/// Starts the threads. The destructor interrupts them; only a connection attempt can delay it, by up to connect_ms.
std::unique_ptr<Etcd> make_etcd(EtcdOptions options);

}  // namespace kvferry::controller::scale
