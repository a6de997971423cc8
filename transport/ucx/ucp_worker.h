// The UCP context and worker of one transport. Private to this folder.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/result.h"
#include "transport/ucx/ucx_library.h"

namespace kvferry::ucx {

/// Returns "<doing>: <UCX's text>".
std::string describe_status(const char* doing, ucs_status_t status);

/// A UCP worker with its context. Threads: the progress thread alone, from create() to the destructor. Endpoints,
/// memory handles and rkeys must be gone before the worker.
class UcpWorker {
 public:
  /// Loads and starts UCX, which uses TCP only if the environment's UCX_TLS allows it. kUnavailable: there is no UCX,
  /// or it can't start on this machine with the environment's UCX_* variables. `nics`: names of the network cards that
  /// UCX uses; empty: UCX decides.
  static Result<std::unique_ptr<UcpWorker>> create(const std::vector<std::string>& nics);
  UcpWorker(const UcpWorker&) = delete;
  UcpWorker& operator=(const UcpWorker&) = delete;
  ~UcpWorker();

  /// Returns kUnavailable if UCX_TLS is not set and UCX has found no RDMA: its transports within a host report no dead
  /// peers, so that UCX refuses to use them alone.
  Result<void> check_reach() const;
  Result<std::string> address() const;
  /// Registers a handler, which is called with `arg` inside progress().
  Result<void> on_active_message(unsigned am_id, ucp_am_recv_callback_t handler, void* arg);
  /// Sends a message and keeps its bytes until UCX no longer needs them. A later failure means a broken connection,
  /// which UCX reports to the endpoint's error handler, if it has one.
  ucs_status_t send(ucp_ep_h ep, unsigned am_id, std::string bytes, bool wants_answer);
  /// Returns the number of bytes of messages that UCX has not sent yet on this endpoint.
  std::uint64_t unsent_bytes(ucp_ep_h ep) const;
  /// Lets UCX send and receive, and calls handlers and callbacks. Returns whether there was anything to do.
  bool progress() { return api().ucp_worker_progress(worker_) != 0; }
  /// Calls progress() until UCX has sent all it owes, its own answers to nodes that are connecting too. UCX 1.13 aborts
  /// the process if a worker is destroyed while such an answer waits. So a worker that still owes something after
  /// `patience` is never destroyed; its memory and sockets stay until the process ends.
  void flush(const Clock& clock, TimeNs patience);
  /// Returns whether the thread may sleep until event_fd() is readable.
  bool arm();
  int event_fd() const { return event_fd_; }
  ucp_worker_h handle() const { return worker_; }

  struct Memory {
    ucp_mem_h handle = nullptr;
    std::string rkey;  // packed remote key for peers
  };
  /// Registers memory with UCX. kUnavailable: UCX refuses the memory, or does not support memory of this type.
  Result<Memory> map_memory(void* base, std::uint64_t bytes, ucs_memory_type_t type);
  void unmap_memory(ucp_mem_h handle);

 private:
  struct Unsent {
    UcpWorker* worker;
    ucp_ep_h ep;
    std::string bytes;
    std::list<Unsent>::iterator self;
  };

  UcpWorker() = default;
  void erase(std::list<Unsent>::iterator unsent);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  bool owes_messages_ = false;  // true if flush() ran out of patience
  int event_fd_ = -1;
  std::list<Unsent> unsent_;
  std::unordered_map<ucp_ep_h, std::uint64_t> unsent_bytes_;
};

}  // namespace kvferry::ucx
