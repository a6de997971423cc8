// The UCP context and worker of one transport, with what belongs to them alone. Private to this folder.
#pragma once

#include <ucp/api/ucp.h>

#include <cstdint>
#include <memory>
#include <string>

#include "transport/base/result.h"

namespace kvferry::ucx {

/// One status as an Error's story: "<doing>: <UCX's text>".
std::string story_of(const char* doing, ucs_status_t status);

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
  Result<Memory> map_memory(void* base, std::uint64_t bytes);
  void unmap_memory(ucp_mem_h handle);

 private:
  UcpWorker() = default;

  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int event_fd_ = -1;
};

}  // namespace kvferry::ucx
