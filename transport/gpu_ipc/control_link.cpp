// How the gpu_ipc backend uses its control link, an inner shared memory transport: for hellos, for watches (requests
// that end when the peer is gone) and for notifications.
#include <utility>

#include "transport/base/check.h"
#include "transport/gpu_ipc/gpu_ipc_backend.h"

namespace kvferry::gpu_ipc {

bool GpuIpcBackend::drain_control() {
  const std::vector<Completion> completions = control_->poll();
  for (const Completion& completion : completions) {
    const auto found = control_requests_.find(completion.id);
    KVFERRY_CHECK(found != control_requests_.end(),
                  "the connection for control messages completed transfer {}, which was not submitted or has ended",
                  completion.id);
    const ControlRequest request = std::move(found->second);
    control_requests_.erase(found);
    on_control_request(request, completion);
  }
  has_backlog_ = table_.completion_queue().is_full_of_notifications();
  if (has_backlog_) return !completions.empty();
  std::vector<Notification> notes = control_->poll_notifications();
  for (Notification& note : notes) table_.completion_queue().notify(std::move(note));
  return !completions.empty() || !notes.empty();
}

bool GpuIpcBackend::notify(Transfer& transfer) {
  const AcceptedTransfer& accepted = transfer.device.accepted();
  PagedTransfer nothing = without_ranges(*transfer.peer);
  nothing.notification = accepted.notification;
  nothing.priority = accepted.priority;
  const Result<TransferId> sent = control_->submit(std::move(nothing));
  if (!sent && sent.error().code == ErrorCode::kFull) {
    is_polling_ = true;
    return false;
  }
  if (!sent) {
    complete(accepted.id, ErrorCode::kPeerLost, sent.error().what);
    return true;
  }
  transfer.notification = *sent;
  transfer.mappings.reset();
  control_requests_.emplace(*sent, ControlRequest{ControlRequest::Kind::kNotification, transfer.peer, accepted.id});
  return has_control_requests_to_push_ = true;
}

PagedTransfer GpuIpcBackend::without_ranges(const Peer& peer) const {
  return {peer.control, Direction::kPush, control_region_, peer.control_region, {}, ""};
}

void GpuIpcBackend::send_hello(const PeerPtr& peer) {
  peer->has_hello = true;
  // The hello completes with kOk once a live process has proved that the peer's address is its own. The watch is a
  // transfer to which no ranges are ever fed, so it stays pending until the control link to the peer ends.
  for (const ControlRequest::Kind kind : {ControlRequest::Kind::kHello, ControlRequest::Kind::kWatch}) {
    PagedTransfer nothing = without_ranges(*peer);
    nothing.is_fed = kind == ControlRequest::Kind::kWatch;
    const Result<TransferId> sent = control_->submit(nothing);
    if (!sent) return lose(*peer, sent.error().what);
    control_requests_.emplace(*sent, ControlRequest{kind, peer, TransferId{}});
  }
  has_control_requests_to_push_ = true;
}

void GpuIpcBackend::on_control_request(const ControlRequest& request, const Completion& completion) {
  const bool is_ok = completion.code == ErrorCode::kOk;
  if (!is_ok && !is_stopping_ && completion.code != ErrorCode::kCancelled) lose(*request.peer, completion.what);
  if (request.kind == ControlRequest::Kind::kHello && is_ok) request.peer->is_verified = true;
  if (request.kind == ControlRequest::Kind::kNotification) complete(request.transfer, completion.code, completion.what);
}

}  // namespace kvferry::gpu_ipc
