// A way in to the controller: ZeroMQ, a stream, HTTP, engines' own events. The server's one thread drives them all.
#pragma once

#include "transport/base/clock.h"

namespace kvferry::controller {

/// Threads: the owner thread of the directory, which is the server's. What a front does elsewhere (a library's threads)
/// it hands over behind fd().
class Listener {
 public:
  virtual ~Listener() = default;

  /// Readable when take() has something to do; may be edge-triggered, as ZeroMQ's is. Negative: nothing to wait for.
  virtual int fd() const = 0;

  /// Does what waits, up to a bound, so that no front starves another or puts off the leases. Never blocks, never
  /// throws, whatever a peer sent. Called in every turn of the server's loop, at least every 100 ms, also if fd() says
  /// nothing. True: more waits, and the loop comes back without sleeping.
  virtual bool take(TimeNs now) = 0;
};

}  // namespace kvferry::controller
