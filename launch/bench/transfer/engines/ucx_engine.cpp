// UCX, used as ucx_perftest uses it: a put or get for each block, a flush, a message; no failure handling, and the
// program spins. LD_LIBRARY_PATH makes the loader find PyPI's newest UCX (worker_command.cpp).
#include <ucp/api/ucp.h>

#include <algorithm>
#include <vector>

#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/engine.h"

namespace kvferry::bench {
namespace {

constexpr unsigned kMessage = 1;
constexpr std::size_t kWindow = 64;  // operations in flight

Error failed(const char* what, ucs_status_t status) {
  return {ErrorCode::kUnavailable, fmt::format("UCX: {}: {}", what, ucs_status_string(status))};
}

class UcxEngine final : public Engine {
 public:
  ~UcxEngine() override {
    if (rkey_ != nullptr) ucp_rkey_destroy(rkey_);
    if (endpoint_ != nullptr) {
      ucp_request_param_t close{};
      close.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
      close.flags = UCP_EP_CLOSE_FLAG_FORCE;
      static_cast<void>(finish(ucp_ep_close_nbx(endpoint_, &close)));
    }
    if (mapped_ != nullptr) ucp_mem_unmap(context_, mapped_);
    if (worker_ != nullptr) ucp_worker_destroy(worker_);
    if (context_ != nullptr) ucp_cleanup(context_);
  }

  Result<nlohmann::json> start(const WorkerSpec&, BenchMemory& memory) override {
    memory_ = memory.span();
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM;
    if (const ucs_status_t status = ucp_init(&params, nullptr, &context_); status != UCS_OK)
      return failed("cannot start", status);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    if (const ucs_status_t status = ucp_worker_create(context_, &worker, &worker_); status != UCS_OK)
      return failed("no worker", status);
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessage;
    handler.cb = &UcxEngine::on_message;
    handler.arg = this;
    if (const ucs_status_t status = ucp_worker_set_am_recv_handler(worker_, &handler); status != UCS_OK)
      return failed("no message handler", status);
    return map_memory();
  }

  Result<void> connect(const nlohmann::json& peer) override {
    const Result<std::string> address = from_hex(peer.value("address", ""));
    const Result<std::string> rkey = from_hex(peer.value("rkey", ""));
    if (!address) return address.error();
    if (!rkey) return rkey.error();
    others_base_ = peer.value("base", std::uint64_t{0});
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<const ucp_address_t*>(address->data());
    if (const ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint_); status != UCS_OK)
      return failed("no endpoint", status);
    if (const ucs_status_t status = ucp_ep_rkey_unpack(endpoint_, rkey->data(), &rkey_); status != UCS_OK)
      return failed("bad rkey", status);
    return {};
  }

  std::string describe() const override { return fmt::format("UCX {}", ucp_get_version_string()); }

  Result<void> transfer() override {
    if (Result<void> ok = move(own_.size()); !ok) return ok;
    return wait_for_message();
  }
  Result<void> answer() override {
    if (Result<void> ok = wait_for_message(); !ok) return ok;
    return send_message();
  }
  Result<void> ping() override {
    if (Result<void> ok = move(1); !ok) return ok;
    return wait_for_message();
  }
  Result<void> pong() override {
    if (Result<void> ok = wait_for_message(); !ok) return ok;
    return move(1);
  }

 private:
  static ucs_status_t on_message(void* arg, const void*, std::size_t, void*, std::size_t, const ucp_am_recv_param_t*) {
    ++static_cast<UcxEngine*>(arg)->num_messages_;
    return UCS_OK;
  }

  Result<nlohmann::json> map_memory() {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = memory_.data();
    params.length = memory_.size();
    if (const ucs_status_t status = ucp_mem_map(context_, &params, &mapped_); status != UCS_OK)
      return failed("cannot map the memory", status);
    void* rkey = nullptr;
    std::size_t rkey_bytes = 0;
    if (const ucs_status_t status = ucp_rkey_pack(context_, mapped_, &rkey, &rkey_bytes); status != UCS_OK)
      return failed("no rkey", status);
    const std::string rkey_hex = to_hex({static_cast<const char*>(rkey), rkey_bytes});
    ucp_rkey_buffer_release(rkey);
    ucp_address_t* address = nullptr;
    std::size_t address_bytes = 0;
    if (const ucs_status_t status = ucp_worker_get_address(worker_, &address, &address_bytes); status != UCS_OK)
      return failed("no address", status);
    const std::string address_hex = to_hex({reinterpret_cast<const char*>(address), address_bytes});
    ucp_worker_release_address(worker_, address);
    return nlohmann::json{
        {"address", address_hex}, {"rkey", rkey_hex}, {"base", reinterpret_cast<std::uintptr_t>(memory_.data())}};
  }

  /// Spins until a request has completed, and frees it.
  Result<void> finish(ucs_status_ptr_t request) {
    if (request == nullptr) return {};
    if (UCS_PTR_IS_ERR(request)) return failed("an operation was refused", UCS_PTR_STATUS(request));
    const Deadline deadline(kPatience);
    ucs_status_t status = UCS_INPROGRESS;
    while ((status = ucp_request_check_status(request)) == UCS_INPROGRESS) {
      if (ucp_worker_progress(worker_) != 0) continue;
      if (Result<void> ok = deadline.check("UCX's completion"); !ok) return ok;
    }
    ucp_request_free(request);
    return status == UCS_OK ? Result<void>() : failed("an operation failed", status);
  }

  Result<void> move(std::size_t num_blocks) {
    const ucp_request_param_t plain{};
    std::vector<ucs_status_ptr_t> window(std::min(kWindow, num_blocks), nullptr);
    for (std::size_t i = 0; i < num_blocks; ++i) {
      ucs_status_ptr_t& slot = window[i % window.size()];
      if (Result<void> ok = finish(slot); !ok) return ok;
      std::byte* own = memory_.data() + own_[i];
      const std::uint64_t other = others_base_ + others_[i];
      slot = job_.is_push ? ucp_put_nbx(endpoint_, own, job_.block_bytes, other, rkey_, &plain)
                          : ucp_get_nbx(endpoint_, own, job_.block_bytes, other, rkey_, &plain);
    }
    for (const ucs_status_ptr_t slot : window) {
      if (Result<void> ok = finish(slot); !ok) return ok;
    }
    if (job_.is_push) {
      if (Result<void> ok = finish(ucp_ep_flush_nbx(endpoint_, &plain)); !ok) return ok;
    }
    return send_message();
  }

  Result<void> send_message() {
    const ucp_request_param_t plain{};
    if (Result<void> ok = finish(ucp_am_send_nbx(endpoint_, kMessage, nullptr, 0, nullptr, 0, &plain)); !ok) return ok;
    ucp_worker_progress(worker_);
    return {};
  }

  Result<void> wait_for_message() {
    const Deadline deadline(kPatience);
    while (num_messages_ == 0) {
      if (ucp_worker_progress(worker_) != 0) continue;
      if (Result<void> ok = deadline.check("UCX's message"); !ok) return ok;
    }
    --num_messages_;
    return {};
  }

  std::span<std::byte> memory_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_mem_h mapped_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  ucp_rkey_h rkey_ = nullptr;
  std::uint64_t others_base_ = 0;
  int num_messages_ = 0;
};

}  // namespace

std::unique_ptr<Engine> make_ucx_engine() { return std::make_unique<UcxEngine>(); }

}  // namespace kvferry::bench
