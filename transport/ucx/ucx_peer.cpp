#include "transport/ucx/ucx_peer.h"

#include <algorithm>
#include <set>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/printable.h"
#include "transport/ucx/transport_names.h"

namespace kvferry::ucx {
namespace {

constexpr std::size_t kRkeysMax = 64;  // when a peer has this number of unpacked keys, those not in use are destroyed

/// Returns a copy, followed by bytes whose highest bit is set. UCX takes no length and stops reading lists at such a
/// byte, so UCX reads nothing beyond the returned bytes even if the peer's bytes are malformed.
std::string padded(const std::string& bytes) { return bytes + std::string(4096, '\xff'); }

/// Returns whether the request has ended. If it has ended, frees it.
bool is_over(ucs_status_ptr_t& request) {
  if (UCS_PTR_IS_PTR(request)) {
    if (api().ucp_request_check_status(request) == UCS_INPROGRESS) return false;
    api().ucp_request_free(request);
  }
  request = nullptr;
  return true;
}

}  // namespace

UcxPeer::~UcxPeer() {
  KVFERRY_CHECK(ep_ == nullptr, "peer {} of the UCX backend was dropped before its connection was closed", id_);
}

void UcxPeer::connect() {
  if (state_ != State::kIdle) return;
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  const std::string worker_address = padded(address_.worker_address);
  params.address = reinterpret_cast<const ucp_address_t*>(worker_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* arg, ucp_ep_h, ucs_status_t status) {
    static_cast<UcxPeer*>(arg)->fail(describe_status("the UCX connection broke", status));
  };
  params.err_handler.arg = this;
  if (const ucs_status_t status = api().ucp_ep_create(worker_.handle(), &params, &ep_); status != UCS_OK) {
    ep_ = nullptr;
    return fail(
        describe_status("UCX cannot connect to the peer (both sides need RDMA, or a UCX_TLS that allows tcp)", status));
  }
  state_ = State::kConnecting;
  hello_ = encode(Hello{kProtocolVersion, address_.incarnation, token_, address_.secret});
  ucp_request_param_t request{};
  request.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  request.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER;
  hello_request_ = api().ucp_am_send_nbx(ep_, kHelloAm, nullptr, 0, hello_.data(), hello_.size(), &request);
  if (UCS_PTR_IS_ERR(hello_request_))
    fail(describe_status("UCX cannot send the handshake to the peer", UCS_PTR_STATUS(hello_request_)));
}

void UcxPeer::on_welcome(const Welcome& welcome) {
  if (state_ != State::kConnecting) return;
  if (!welcome.refusal.empty())
    return fail("the peer refused the connection: " + printable(welcome.refusal, kPeerTextMax));
  state_ = State::kReady;
  const std::set<std::string> names = transports_of(ep_);
  prefers_packing_ =
      std::all_of(names.begin(), names.end(), [](const std::string& name) { return name.starts_with("tcp"); });
  is_tcp_alone_ = prefers_packing_ && !names.empty();
}

void UcxPeer::watch(TimeNs now, TimeNs silence_ns) {
  const bool owes = !is_failed() && (state_ == State::kConnecting || num_posted > 0 || num_unanswered > 0);
  // A long time in which this process itself did not run does not count as the peer's silence.
  const bool was_away = now - std::exchange(watched_at_, now) >= silence_ns / 2;
  if ((!std::exchange(owed_, owes) || was_away) && owes) alive_at_ = pinged_at_ = now;
  if (!owes || now < silence_deadline(silence_ns)) return;
  // Only an unanswered hello or ping shows that the peer is silent. Without one, this thread itself may have had no
  // time to receive.
  if (state_ == State::kConnecting || pinged_at_ > alive_at_)
    return fail(fmt::format("the peer owes an answer and was silent for {} ms; the limit is {} ms (setting silence_ms)",
                            (now - alive_at_) / kMillisecond, silence_ns / kMillisecond));
  pinged_at_ = now;
  if (const ucs_status_t status = worker_.send(ep_, kPingAm, encode(Ping{token_, address_.secret}), true);
      status != UCS_OK)
    fail(describe_status("UCX refused to send a ping", status));
}

TimeNs UcxPeer::watch_deadline(TimeNs silence_ns) const {
  if (!owed_ || is_failed()) return 0;
  return std::min(silence_deadline(silence_ns), watched_at_ + silence_ns / 4);
}

TimeNs UcxPeer::silence_deadline(TimeNs silence_ns) const {
  if (state_ == State::kConnecting) return alive_at_ + silence_ns;
  return pinged_at_ > alive_at_ ? pinged_at_ + silence_ns - silence_ns / 4 : alive_at_ + silence_ns / 4;
}

void UcxPeer::fail(std::string why) {
  if (is_failed()) return;
  state_ = State::kFailed;
  why_ = std::move(why);
}

void UcxPeer::drain(TimeNs deadline) {
  if (is_failed() || is_draining()) return;
  drain_deadline_ = deadline;
  if (ep_ == nullptr) return;
  const ucp_request_param_t request{};
  flush_request_ = api().ucp_ep_flush_nbx(ep_, &request);
}

void UcxPeer::advance_close(TimeNs now) {
  if (is_over(hello_request_) && state_ == State::kReady) hello_.clear();
  if (is_draining() && !is_failed() && ((is_over(flush_request_) && num_posted == 0) || now >= drain_deadline_))
    fail("this process disconnected the peer");
  if (state_ != State::kFailed) return;
  if (ep_ != nullptr) {
    ucp_request_param_t request{};
    request.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    request.flags = UCP_EP_CLOSE_FLAG_FORCE;
    close_request_ = api().ucp_ep_close_nbx(std::exchange(ep_, nullptr), &request);
  }
  if (!is_over(close_request_) || !is_over(hello_request_) || !is_over(flush_request_) || num_posted > 0) return;
  rkeys_.clear();
  state_ = State::kClosed;
}

Result<RkeyPtr> UcxPeer::rkey(const std::string& packed) {
  if (const auto found = rkeys_.find(packed); found != rkeys_.end()) return found->second;
  if (rkeys_.size() >= kRkeysMax)
    std::erase_if(rkeys_, [](const auto& entry) { return entry.second.use_count() == 1; });
  if (packed.empty() || packed.size() > kRkeyBytesMax)
    return Error{ErrorCode::kInternal,
                 fmt::format("the peer's remote key has {} bytes; 1 to {} are allowed", packed.size(), kRkeyBytesMax)};
  ucp_rkey_h rkey = nullptr;
  if (const ucs_status_t status = api().ucp_ep_rkey_unpack(ep_, padded(packed).data(), &rkey); status != UCS_OK)
    return Error{ErrorCode::kInternal, describe_status("UCX cannot read the peer's remote key", status)};
  return rkeys_.emplace(packed, RkeyPtr(rkey, api().ucp_rkey_destroy)).first->second;
}

std::string UcxPeer::transports() const {
  const std::set<std::string> names = ep_ == nullptr ? std::set<std::string>() : transports_of(ep_);
  return names.empty() ? "unknown" : fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace kvferry::ucx
