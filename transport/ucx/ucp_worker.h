// The UCP context and worker of one transport, with what belongs to them alone. Private to this folder.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "transport/base/result.h"

namespace kvferry::ucx {

/// One status as an Error's story: "<doing>: <UCX's text>".
std::string describe_status(const char* doing, ucs_status_t status);

/// Threads: the progress thread alone, from create() to the destructor. Everything made with the worker (endpoints,
/// memory handles, rkeys) must be gone before it.
class UcpWorker {
 public:
  /// kUnavailable: UCX can't start with this machine and these variables.
  static Result<std::unique_ptr<UcpWorker>> create();
  UcpWorker(const UcpWorker&) = delete;
  UcpWorker& operator=(const UcpWorker&) = delete;
  ~UcpWorker();

  Result<std::string> address() const;
  /// handler gets `arg`; it runs inside progress().
  Result<void> on_active_message(unsigned am_id, ucp_am_recv_callback_t handler, void* arg);
  /// Sends a message whose bytes the worker keeps until UCX is through with them. A send that fails later means a
  /// broken connection, which whoever waits for an answer sees by other means.
  ucs_status_t send(ucp_ep_h ep, unsigned am_id, std::string bytes, bool wants_answer);
  /// Not yet through, on that endpoint.
  std::uint64_t unsent_bytes(ucp_ep_h ep) const;
  /// False: nothing was there to do.
  bool progress() { return ucp_worker_progress(worker_) != 0; }
  /// True: event_fd() becomes readable with the next event, so the thread may sleep on it.
  bool arm();
  int event_fd() const { return event_fd_; }
  ucp_worker_h handle() const { return worker_; }

  struct Memory {
    ucp_mem_h handle = nullptr;
    std::string rkey;  // packed, for peers
  };
  /// kUnavailable: UCX refuses, or it knows no memory of this type.
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
  void forget(std::list<Unsent>::iterator unsent);

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
  std::list<Unsent> unsent_;
  std::unordered_map<ucp_ep_h, std::uint64_t> unsent_bytes_;
};

}  // namespace kvferry::ucx
