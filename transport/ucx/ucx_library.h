// UCX's functions, which are loaded at run time, so that programs start on hosts without UCX. Also used by the
// benchmark's UCX engine.
#pragma once

#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include "transport/base/result.h"

namespace kvferry::ucx {

#define KVFERRY_UCX_FUNCTIONS(F)    \
  F(ucp_am_send_nbx)                \
  F(ucp_cleanup)                    \
  F(ucp_config_modify)              \
  F(ucp_config_read)                \
  F(ucp_config_release)             \
  F(ucp_context_print_info)         \
  F(ucp_context_query)              \
  F(ucp_ep_close_nbx)               \
  F(ucp_ep_create)                  \
  F(ucp_ep_flush_nbx)               \
  F(ucp_ep_print_info)              \
  F(ucp_ep_rkey_unpack)             \
  F(ucp_get_nbx)                    \
  F(ucp_get_version)                \
  F(ucp_get_version_string)         \
  F(ucp_init_version)               \
  F(ucp_mem_map)                    \
  F(ucp_mem_unmap)                  \
  F(ucp_put_nbx)                    \
  F(ucp_request_check_status)       \
  F(ucp_request_free)               \
  F(ucp_rkey_buffer_release)        \
  F(ucp_rkey_destroy)               \
  F(ucp_rkey_pack)                  \
  F(ucp_worker_arm)                 \
  F(ucp_worker_create)              \
  F(ucp_worker_destroy)             \
  F(ucp_worker_flush_nbx)           \
  F(ucp_worker_get_address)         \
  F(ucp_worker_get_efd)             \
  F(ucp_worker_progress)            \
  F(ucp_worker_release_address)     \
  F(ucp_worker_set_am_recv_handler) \
  F(ucs_log_push_handler)           \
  F(ucs_status_string)

struct Api {
#define KVFERRY_UCX_MEMBER(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses)
  KVFERRY_UCX_FUNCTIONS(KVFERRY_UCX_MEMBER)
#undef KVFERRY_UCX_MEMBER
};

/// Loads UCX once for the whole process. A UCX that the process has loaded already is used. Otherwise, if
/// KVFERRY_UCX_LIBRARY is set, only the libucp.so.0 that it names is tried; if not, the libucp.so.0 of the build's
/// UCX_ROOT, of a PyPI package such as libucx-cu13 beside this module or program, and of the system are tried in this
/// order. kUnavailable: none can be loaded, or the loaded one lacks a function; the message says what to install.
Result<void> load_ucx();

namespace internal {
extern Api api;
}

/// Precondition: load_ucx() has succeeded.
inline const Api& api() { return internal::api; }

}  // namespace kvferry::ucx
