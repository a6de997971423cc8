// The progress engine's active messages: hello, welcome, notification.
#include <optional>
#include <utility>

#include "transport/base/log.h"
#include "transport/ucx/progress_engine.h"

namespace kvferry::ucx {
namespace {

/// Nothing for a message that none of our own sends: it is logged and dropped.
template <class Message>
std::optional<Message> read(const void* data, std::size_t bytes, const ucp_am_recv_param_t* param, const char* what) {
  if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
    log().warn("transport: dropped a {} of {} bytes, which is too long", what, bytes);
    return std::nullopt;
  }
  Result<Message> message = decode<Message>({static_cast<const char*>(data), bytes}, what);
  if (message) return std::move(*message);
  log().warn("transport: dropped a {}: {}", what, message.error().what);
  return std::nullopt;
}

}  // namespace

Result<void> ProgressEngine::set_up() {
  Result<std::unique_ptr<UcpWorker>> worker = UcpWorker::create();
  if (!worker) return std::move(worker).error();
  worker_ = std::move(*worker);
  Result<std::string> worker_address = worker_->address();
  if (!worker_address) return std::move(worker_address).error();
  address_ = encode(Address{kProtocolVersion, incarnation_, std::move(*worker_address)});

  using Param = const ucp_am_recv_param_t*;
  const ucp_am_recv_callback_t hello = [](void* arg, const void*, std::size_t, void* data, std::size_t bytes,
                                          Param param) {
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) == 0) return UCS_OK;
    if (auto message = read<Hello>(data, bytes, param, "hello"))
      static_cast<ProgressEngine*>(arg)->on_hello(*message, param->reply_ep);
    return UCS_OK;
  };
  const ucp_am_recv_callback_t welcome = [](void* arg, const void*, std::size_t, void* data, std::size_t bytes,
                                            Param param) {
    if (auto message = read<Welcome>(data, bytes, param, "welcome"))
      static_cast<ProgressEngine*>(arg)->on_welcome(*message);
    return UCS_OK;
  };
  const ucp_am_recv_callback_t notification = [](void* arg, const void*, std::size_t, void* data, std::size_t bytes,
                                                 Param param) {
    if (auto message = read<NotificationMessage>(data, bytes, param, "notification"))
      static_cast<ProgressEngine*>(arg)->on_notification(std::move(*message));
    return UCS_OK;
  };
  if (Result<void> ok = worker_->on_active_message(kHelloAm, hello, this); !ok) return ok;
  if (Result<void> ok = worker_->on_active_message(kWelcomeAm, welcome, this); !ok) return ok;
  return worker_->on_active_message(kNotificationAm, notification, this);
}

void ProgressEngine::on_hello(const Hello& hello, ucp_ep_h reply_ep) {
  Welcome welcome{hello.token, ""};
  if (hello.protocol_version != kProtocolVersion)
    welcome.refusal =
        fmt::format("it speaks transport protocol {}, this side {}", kProtocolVersion, hello.protocol_version);
  else if (hello.to_incarnation != incarnation_)
    welcome.refusal = "another process answers at its address";
  auto bytes = std::make_unique<std::string>(encode(welcome));
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS;
  param.flags = UCP_AM_SEND_FLAG_EAGER;
  param.user_data = bytes.get();
  param.cb.send = [](void* request, ucs_status_t, void* user_data) {
    ucp_request_free(request);
    delete static_cast<std::string*>(user_data);
  };
  // A send that fails means a broken connection, which the greeter sees on its own side.
  if (UCS_PTR_IS_PTR(ucp_am_send_nbx(reply_ep, kWelcomeAm, nullptr, 0, bytes->data(), bytes->size(), &param)))
    static_cast<void>(bytes.release());
}

void ProgressEngine::on_welcome(const Welcome& welcome) {
  if (const auto entry = peers_.find(PeerId{welcome.token}); entry != peers_.end())
    entry->second.peer->on_welcome(welcome);
}

void ProgressEngine::on_notification(NotificationMessage message) {
  if (!ledger_.outbox().notify({std::move(message.from), std::move(message.body)}))
    log().error("transport: dropped a notification because {} are unread", Outbox::kNotificationsMax);
}

}  // namespace kvferry::ucx
