// Measures UCX, called as ucx_perftest calls it: a put or get for each block, a flush after puts, and a message,
// without UCX's error handling and without sleeping. worker_command.cpp sets the environment variable that names the
// UCX from PyPI.
#include <algorithm>
#include <vector>

#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/transfer/engine.h"
#include "transport/ucx/ucx_library.h"

namespace kvferry::bench {
namespace {

using ucx::api;

constexpr unsigned kMessage = 1;
constexpr std::size_t kWindow = 64;  // maximum number of operations in flight

void check(ucs_status_t status, const char* what) {
  if (status == UCS_OK) return;
  throw Failure({ErrorCode::kUnavailable, fmt::format("{}: {}", what, api().ucs_status_string(status))});
}

class UcxEngine final : public Engine {
 public:
  ~UcxEngine() override {
    if (rkey_ != nullptr) api().ucp_rkey_destroy(rkey_);
    if (endpoint_ != nullptr) {
      ucp_request_param_t close{};
      close.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
      close.flags = UCP_EP_CLOSE_FLAG_FORCE;
      static_cast<void>(attempt([&] { finish(api().ucp_ep_close_nbx(endpoint_, &close)); }));
    }
    if (mapped_ != nullptr) api().ucp_mem_unmap(context_, mapped_);
    if (worker_ != nullptr) api().ucp_worker_destroy(worker_);
    if (context_ != nullptr) api().ucp_cleanup(context_);
  }

  nlohmann::json start(const WorkerSpec&, BenchMemory& memory) override {
    need(ucx::load_ucx());
    memory_ = memory.span();
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM;
    check(api().ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, nullptr, &context_), "UCX cannot start");
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    check(api().ucp_worker_create(context_, &worker, &worker_), "UCX cannot create a worker");
    ucp_am_handler_param_t handler{};
    handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG;
    handler.id = kMessage;
    handler.cb = &UcxEngine::on_message;
    handler.arg = this;
    check(api().ucp_worker_set_am_recv_handler(worker_, &handler), "UCX cannot register a handler of messages");
    return map_memory();
  }

  void connect(const nlohmann::json& peer) override {
    const std::string address = need(from_hex(peer.value("address", "")));
    const std::string rkey = need(from_hex(peer.value("rkey", "")));
    others_base_ = peer.value("base", std::uint64_t{0});
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<const ucp_address_t*>(address.data());
    check(api().ucp_ep_create(worker_, &params, &endpoint_), "UCX cannot create an endpoint");
    check(api().ucp_ep_rkey_unpack(endpoint_, rkey.data(), &rkey_),
          "UCX cannot use the remote key (rkey) of the other side's memory");
  }

  std::string describe() const override { return fmt::format("UCX {}", api().ucp_get_version_string()); }

  void transfer() override {
    move(own_.size());
    wait_for_message();
  }
  void answer() override {
    wait_for_message();
    send_message();
  }
  void ping() override {
    move(1);
    wait_for_message();
  }
  void pong() override {
    wait_for_message();
    move(1);
  }

 private:
  static ucs_status_t on_message(void* arg, const void*, std::size_t, void*, std::size_t, const ucp_am_recv_param_t*) {
    ++static_cast<UcxEngine*>(arg)->num_messages_;
    return UCS_OK;
  }

  nlohmann::json map_memory() {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = memory_.data();
    params.length = memory_.size();
    check(api().ucp_mem_map(context_, &params, &mapped_), "UCX cannot register the memory of the measurement");
    void* rkey = nullptr;
    std::size_t rkey_bytes = 0;
    check(api().ucp_rkey_pack(context_, mapped_, &rkey, &rkey_bytes),
          "UCX cannot make a remote key (rkey) for the memory of the measurement");
    const std::string rkey_hex = to_hex({static_cast<const char*>(rkey), rkey_bytes});
    api().ucp_rkey_buffer_release(rkey);
    ucp_address_t* address = nullptr;
    std::size_t address_bytes = 0;
    check(api().ucp_worker_get_address(worker_, &address, &address_bytes), "UCX cannot get the worker's address");
    const std::string address_hex = to_hex({reinterpret_cast<const char*>(address), address_bytes});
    api().ucp_worker_release_address(worker_, address);
    return {{"address", address_hex}, {"rkey", rkey_hex}, {"base", reinterpret_cast<std::uintptr_t>(memory_.data())}};
  }

  /// Spins until a request has completed, and frees the request.
  void finish(ucs_status_ptr_t request) {
    if (request == nullptr) return;
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "UCX refused an operation");
    const Deadline deadline(kPatience);
    ucs_status_t status = UCS_INPROGRESS;
    while ((status = api().ucp_request_check_status(request)) == UCS_INPROGRESS) {
      if (api().ucp_worker_progress(worker_) != 0) continue;
      need(deadline.check("the end of an operation of UCX"));
    }
    api().ucp_request_free(request);
    check(status, "an operation of UCX failed");
  }

  void move(std::size_t num_blocks) {
    const ucp_request_param_t plain{};
    std::vector<ucs_status_ptr_t> window(std::min(kWindow, num_blocks), nullptr);
    for (std::size_t i = 0; i < num_blocks; ++i) {
      ucs_status_ptr_t& slot = window[i % window.size()];
      finish(slot);
      std::byte* own = memory_.data() + own_[i];
      const std::uint64_t other = others_base_ + others_[i];
      slot = job_.is_push ? api().ucp_put_nbx(endpoint_, own, job_.block_bytes, other, rkey_, &plain)
                          : api().ucp_get_nbx(endpoint_, own, job_.block_bytes, other, rkey_, &plain);
    }
    for (const ucs_status_ptr_t slot : window) finish(slot);
    if (job_.is_push) finish(api().ucp_ep_flush_nbx(endpoint_, &plain));
    send_message();
  }

  void send_message() {
    const ucp_request_param_t plain{};
    finish(api().ucp_am_send_nbx(endpoint_, kMessage, nullptr, 0, nullptr, 0, &plain));
    api().ucp_worker_progress(worker_);
  }

  void wait_for_message() {
    const Deadline deadline(kPatience);
    while (num_messages_ == 0) {
      if (api().ucp_worker_progress(worker_) != 0) continue;
      need(deadline.check("the other side's message over UCX"));
    }
    --num_messages_;
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
