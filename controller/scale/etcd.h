// A client of etcd v3 that never makes its owner wait: two threads of its own speak with the JSON gateway, one asks,
// one watches. It moves on to the next member where one does not answer.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "controller/scale/etcd_messages.h"
#include "controller/scale/url.h"

namespace kvferry::controller::scale {

struct EtcdOptions {
  EtcdUrl url;
  std::string watched_prefix;         // of the keys that are watched
  std::int64_t connect_ms = 1000;     // to one member
  std::int64_t request_ms = 2000;     // for its answer
  std::int64_t quiet_ms = 5000;       // after so long without a change the member is asked whether it is in touch
  std::int64_t retry_ms_max = 2000;   // between attempts to watch; begins at 100 and doubles
  std::size_t requests_max = 1024;    // that wait
  std::size_t bytes_max = 64U << 20;  // of an answer; a longer one is an error
};

/// Threads: one owner, for all calls.
class Etcd {
 public:
  virtual ~Etcd() = default;

  /// Readable while events wait.
  virtual int fd() const = 0;
  /// Never blocks. Sent in order, answered by exactly one EtcdReply with the token.
  virtual void ask(std::uint64_t token, EtcdRequest request) = 0;
  /// At most `num_max`. After EtcdAll each change comes once and in order, until EtcdLost or the next EtcdAll.
  virtual std::vector<EtcdEvent> take(std::size_t num_max) = 0;
};

/// Starts the threads. The destructor ends what they do at once, but for a connection being made (connect_ms).
std::unique_ptr<Etcd> make_etcd(EtcdOptions options);

}  // namespace kvferry::controller::scale
