#include "transport/ucx/ucp_worker.h"

#include <ucs/config/types.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "transport/base/log.h"
#include "transport/ucx/transport_names.h"

namespace kvferry::ucx {
namespace {

/// Returns the version of the library that was loaded, in the form of UCP_VERSION().
unsigned loaded_version() {
  unsigned major = 0;
  unsigned minor = 0;
  unsigned release = 0;
  api().ucp_get_version(&major, &minor, &release);
  return UCP_VERSION(major, minor);
}

/// A library that is older than the headers may not understand the program's calls.
void warn_if_library_is_older_than_headers() {
  if (loaded_version() < UCP_API_VERSION)
    log().warn(
        "kvferry was built for UCX {}.{} but runs with the earlier UCX {}; name a later one in "
        "KVFERRY_UCX_LIBRARY",
        UCP_API_MAJOR, UCP_API_MINOR, api().ucp_get_version_string());
}

/// Writes UCX's messages to kvferry's log, because UCX writes them to stdout, where a command's own output goes. Not
/// used if UCX_LOG_FILE is set.
ucs_log_func_rc_t write_to_own_log(const char*, unsigned, const char*, ucs_log_level_t level,
                                   const ucs_log_component_config_t*, const char* format, va_list arguments) {
  std::array<char, 1024> text{};
  static_cast<void>(std::vsnprintf(text.data(), text.size(), format, arguments));
  const auto own_level = level <= UCS_LOG_LEVEL_ERROR  ? spdlog::level::err
                         : level <= UCS_LOG_LEVEL_WARN ? spdlog::level::warn
                         : level <= UCS_LOG_LEVEL_INFO ? spdlog::level::info
                                                       : spdlog::level::debug;
  log().log(own_level, "UCX: {}", text.data());
  return UCS_LOG_FUNC_RC_STOP;
}

void redirect_ucx_log() {
  static std::once_flag once;
  if (std::getenv("UCX_LOG_FILE") == nullptr)
    std::call_once(once, [] { api().ucs_log_push_handler(write_to_own_log); });
}

/// Sets segments of 256 KiB for the TCP of UCX before 1.14. By default UCX emulates gets and puts by copies of 8 KiB,
/// which take two to three times the processor time. The user's UCX_* variables take precedence. (setenv() is not used,
/// since it would change the whole process.)
void set_tcp_segments(ucp_config_t* config) {
  if (loaded_version() >= UCP_VERSION(1, 14)) return;  // the options' names were tested with UCX 1.13 only
  for (const char* name : {"TX_SEG_SIZE", "RX_SEG_SIZE"}) {
    if (std::getenv(fmt::format("UCX_TCP_{}", name).c_str()) != nullptr) continue;
    if (const ucs_status_t status = api().ucp_config_modify(config, name, "256k"); status != UCS_OK)
      log().warn("transport: cannot set UCX's option TCP_{} to 256k, so transfers over TCP may be slow: {}", name,
                 api().ucs_status_string(status));
  }
}

/// Restricts UCX to the network cards `nics`, and lets one operation use all of them. By default UCX uses up to two for
/// a message, and one for a get or a put; versions before 1.16 have no option for gets and puts.
void set_net_devices(ucp_config_t* config, const std::vector<std::string>& nics) {
  const auto set = [config](const char* name, const std::string& value) {
    if (const ucs_status_t status = api().ucp_config_modify(config, name, value.c_str()); status != UCS_OK)
      log().warn("transport: cannot set UCX's option {} to {}, so UCX uses its own value: {}", name, value,
                 api().ucs_status_string(status));
  };
  set("NET_DEVICES", fmt::format("{}", fmt::join(nics, ",")));
  if (nics.size() < 2) return;
  for (const char* name : {"MAX_RNDV_RAILS", "MAX_RMA_RAILS"}) {
    const bool is_known = name == std::string_view("MAX_RNDV_RAILS") || loaded_version() >= UCP_VERSION(1, 16);
    if (is_known && std::getenv(fmt::format("UCX_{}", name).c_str()) == nullptr)
      set(name, fmt::format("{}", nics.size()));
  }
}

/// Returns whether the user chooses UCX's transports.
bool has_users_transports() { return std::getenv("UCX_TLS") != nullptr; }

/// Leaves TCP out of UCX's transports. A peer that connects to UCX over TCP and ends can end this process, up to
/// UCX 1.22 at least: if UCX fails to answer it, uct_tcp_ep_set_failed() has the endpoint destroyed soon, and then
/// uct_tcp_ep_connect() makes the endpoint usable again. Where UCX was built with assertions, the destruction ends the
/// process; elsewhere it frees what UCP still uses.
Result<void> leave_tcp_out(ucp_config_t* config) {
  if (const ucs_status_t status = api().ucp_config_modify(config, "TLS", "^tcp"); status != UCS_OK)
    return Error{ErrorCode::kUnavailable, describe_status("cannot keep UCX from using TCP", status)};
  return {};
}

/// Turns UCX's cache of registrations off. Each region is registered once, so the cache is of no use. Where UCX does
/// not see CUDA's allocations, such as those of a static CUDA runtime, the cache refuses all GPU memory (seen with UCX
/// 1.22). The user's UCX_RCACHE_ENABLE takes precedence.
void turn_registration_cache_off(ucp_config_t* config) {
  if (std::getenv("UCX_RCACHE_ENABLE") != nullptr) return;
  const ucs_status_t status = api().ucp_config_modify(config, "RCACHE_ENABLE", "n");
  if (status != UCS_OK && status != UCS_ERR_NO_ELEM)  // UCS_ERR_NO_ELEM: this version of UCX has no such option
    log().warn("transport: cannot set UCX's option RCACHE_ENABLE to n, so UCX may refuse GPU memory: {}",
               api().ucs_status_string(status));
}

Error unavailable(const char* doing, ucs_status_t status) {
  const char* tls = std::getenv("UCX_TLS");
  return Error{ErrorCode::kUnavailable, fmt::format("{} (UCX_TLS is {})", describe_status(doing, status),
                                                    tls != nullptr ? fmt::format("'{}'", tls) : "not set")};
}

}  // namespace

std::string describe_status(const char* doing, ucs_status_t status) {
  return fmt::format("{}: {}", doing, api().ucs_status_string(status));
}

Result<std::unique_ptr<UcpWorker>> UcpWorker::create(const std::vector<std::string>& nics) {
  KVFERRY_TRY(load_ucx());
  warn_if_library_is_older_than_headers();
  redirect_ucx_log();
  std::unique_ptr<UcpWorker> made(new UcpWorker());

  ucp_config_t* config = nullptr;
  if (const ucs_status_t status = api().ucp_config_read(nullptr, nullptr, &config); status != UCS_OK)
    return unavailable("cannot read UCX's configuration", status);
  if (!nics.empty()) set_net_devices(config, nics);
  turn_registration_cache_off(config);
  if (has_users_transports()) {
    set_tcp_segments(config);
  } else if (Result<void> done = leave_tcp_out(config); !done) {
    api().ucp_config_release(config);
    return std::move(done).error();
  }
  ucp_params_t context_params{};
  context_params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_NAME;
  context_params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  context_params.name = "kvferry";
  const ucs_status_t context_status =
      api().ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &context_params, config, &made->context_);
  api().ucp_config_release(config);
  if (context_status != UCS_OK) return unavailable("cannot start UCX", context_status);

  ucp_worker_params_t worker_params{};
  worker_params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  worker_params.thread_mode = UCS_THREAD_MODE_SINGLE;
  if (const ucs_status_t status = api().ucp_worker_create(made->context_, &worker_params, &made->worker_);
      status != UCS_OK)
    return unavailable("cannot create a UCX worker", status);
  if (const ucs_status_t status = api().ucp_worker_get_efd(made->worker_, &made->event_fd_); status != UCS_OK)
    return unavailable("cannot get UCX's event descriptor", status);
  return made;
}

Result<void> UcpWorker::check_reach() const {
  if (has_users_transports()) return {};
  const std::set<std::string> names = transports_of(context_);
  if (names.empty() || std::ranges::any_of(names, is_rdma)) return {};
  return Error{
      ErrorCode::kUnavailable,
      fmt::format("UCX {} finds no RDMA device that it can use on this host (the package libucx-cu13 has no RDMA), and "
                  "kvferry lets UCX use TCP only if the variable UCX_TLS allows it, such as UCX_TLS=all, with the risk "
                  "that a peer ends this process (SECURITY.md); paths auto and tcp need no UCX",
                  api().ucp_get_version_string())};
}

UcpWorker::~UcpWorker() {
  if (owes_messages_) return;
  if (worker_ != nullptr) api().ucp_worker_destroy(worker_);
  if (context_ != nullptr) api().ucp_cleanup(context_);
}

Result<std::string> UcpWorker::address() const {
  ucp_address_t* address = nullptr;
  std::size_t bytes = 0;
  if (const ucs_status_t status = api().ucp_worker_get_address(worker_, &address, &bytes); status != UCS_OK)
    return unavailable("cannot get the UCX worker's address", status);
  std::string copy(reinterpret_cast<const char*>(address), bytes);
  api().ucp_worker_release_address(worker_, address);
  return copy;
}

Result<void> UcpWorker::on_active_message(unsigned am_id, ucp_am_recv_callback_t handler, void* arg) {
  ucp_am_handler_param_t params{};
  params.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                      UCP_AM_HANDLER_PARAM_FIELD_ARG;
  params.id = am_id;
  params.flags = UCP_AM_FLAG_WHOLE_MSG;
  params.cb = handler;
  params.arg = arg;
  if (const ucs_status_t status = api().ucp_worker_set_am_recv_handler(worker_, &params); status != UCS_OK)
    return unavailable("UCX cannot receive active messages", status);
  return {};
}

ucs_status_t UcpWorker::send(ucp_ep_h ep, unsigned am_id, std::string bytes, bool wants_answer) {
  unsent_.push_front({this, ep, std::move(bytes), {}});
  const auto unsent = unsent_.begin();
  unsent->self = unsent;
  unsent_bytes_[ep] += unsent->bytes.size();
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  if (wants_answer) param.flags |= UCP_AM_SEND_FLAG_REPLY;
  param.user_data = &*unsent;
  param.cb.send = [](void* request, ucs_status_t, void* user_data) {
    api().ucp_request_free(request);
    auto* sent = static_cast<Unsent*>(user_data);
    sent->worker->erase(sent->self);
  };
  const ucs_status_ptr_t posted =
      api().ucp_am_send_nbx(ep, am_id, nullptr, 0, unsent->bytes.data(), unsent->bytes.size(), &param);
  if (UCS_PTR_IS_PTR(posted)) return UCS_OK;
  erase(unsent);
  return UCS_PTR_STATUS(posted);
}

void UcpWorker::erase(std::list<Unsent>::iterator unsent) {
  const auto found = unsent_bytes_.find(unsent->ep);
  if ((found->second -= unsent->bytes.size()) == 0) unsent_bytes_.erase(found);
  unsent_.erase(unsent);
}

std::uint64_t UcpWorker::unsent_bytes(ucp_ep_h ep) const {
  const auto found = unsent_bytes_.find(ep);
  return found == unsent_bytes_.end() ? 0 : found->second;
}

void UcpWorker::flush(const Clock& clock, TimeNs patience) {
  const ucp_request_param_t param{};
  const ucs_status_ptr_t flushed = api().ucp_worker_flush_nbx(worker_, &param);
  if (!UCS_PTR_IS_PTR(flushed)) return;
  const TimeNs deadline = clock.now() + patience;
  while (api().ucp_request_check_status(flushed) == UCS_INPROGRESS && clock.now() < deadline) progress();
  owes_messages_ = api().ucp_request_check_status(flushed) == UCS_INPROGRESS;
  if (owes_messages_)
    log().warn("transport: UCX still has messages to send after {} ms, so its memory is kept until the process ends",
               patience / kMillisecond);
  else
    api().ucp_request_free(flushed);
}

bool UcpWorker::arm() { return api().ucp_worker_arm(worker_) == UCS_OK; }

Result<UcpWorker::Memory> UcpWorker::map_memory(void* base, std::uint64_t bytes, ucs_memory_type_t type) {
  // ucp_mem_map() accepts memory of any type, even if no transport reaches it and the first copy would fail.
  ucp_context_attr_t known{};
  known.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  if (api().ucp_context_query(context_, &known) != UCS_OK || (known.memory_types & UCS_BIT(type)) == 0)
    return Error{
        ErrorCode::kUnavailable,
        fmt::format("UCX {} does not support {} on this host", api().ucp_get_version_string(),
                    type == UCS_MEMORY_TYPE_CUDA ? "GPU memory (it needs UCX's CUDA transports and NVIDIA's driver)"
                                                 : "host memory")};
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = base;
  params.length = bytes;
  params.memory_type = type;
  Memory memory;
  if (const ucs_status_t status = api().ucp_mem_map(context_, &params, &memory.handle); status != UCS_OK)
    return Error{
        ErrorCode::kUnavailable,
        describe_status("cannot register memory with UCX (for RDMA, ulimit -l must allow to lock it)", status)};
  void* rkey = nullptr;
  std::size_t rkey_bytes = 0;
  if (const ucs_status_t status = api().ucp_rkey_pack(context_, memory.handle, &rkey, &rkey_bytes); status != UCS_OK) {
    api().ucp_mem_unmap(context_, memory.handle);
    return Error{ErrorCode::kUnavailable, describe_status("cannot make a UCX remote key", status)};
  }
  memory.rkey.assign(static_cast<const char*>(rkey), rkey_bytes);
  api().ucp_rkey_buffer_release(rkey);
  return memory;
}

void UcpWorker::unmap_memory(ucp_mem_h handle) {
  if (const ucs_status_t status = api().ucp_mem_unmap(context_, handle); status != UCS_OK)
    log().warn("transport: {}", describe_status("cannot unregister memory with UCX", status));
}

}  // namespace kvferry::ucx
