// The part of UcxBackend that receives and answers active messages.
#include <bit>
#include <optional>
#include <utility>

#include "transport/base/log.h"
#include "transport/ucx/ucx_backend.h"

namespace kvferry::ucx {
namespace {

/// Limit on bytes of answers that one peer has not read: several times what a correct peer requests at a time. Above
/// this limit, the peer's requests get no answer.
constexpr std::uint64_t kUnsentBytesMax = 8 << 20;

}  // namespace

template <class Message>
std::optional<Message> UcxBackend::checked(Result<Message> message, std::string_view what) {
  if (message) return std::move(*message);
  // Only the 1st, 2nd, 4th, 8th ... malformed message is logged, because unknown peers can send as many as they like.
  if (std::has_single_bit(++num_malformed_messages_))
    log().warn("transport: dropped a message that came by UCX and is no valid {} ({} malformed ones so far): {}", what,
               num_malformed_messages_, message.error().what);
  return std::nullopt;
}

Result<void> UcxBackend::set_up() {
  worker_ = KVFERRY_TRY(UcpWorker::create(net_devices_.names));
  KVFERRY_TRY(worker_->check_reach());
  std::string worker_address = KVFERRY_TRY(worker_->address());
  address_ = encode(Address{kProtocolVersion, incarnation_, std::move(worker_address), secret_.root()});
  source_address_ = source_address(options_.key, address_, change_ucx_secret);
  for (const AmId id : {kHelloAm, kWelcomeAm, kNotificationAm, kPingAm, kPongAm, kBlocksAm, kAnswerAm})
    handlers_.push_back({this, id});
  const ucp_am_recv_callback_t receive = [](void* arg, const void*, std::size_t, void* data, std::size_t bytes,
                                            const ucp_am_recv_param_t* param) {
    const auto* handler = static_cast<const Handler*>(arg);
    const bool has_reply_ep = (param->recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
    if ((param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) != 0) {
      log().warn("transport: dropped a UCX message of {} bytes, which is longer than those of a kvferry node", bytes);
    } else {
      handler->backend->on_message(handler->id, {static_cast<const char*>(data), bytes},
                                   has_reply_ep ? param->reply_ep : nullptr);
    }
    return UCS_OK;
  };
  for (Handler& handler : handlers_) {
    KVFERRY_TRY(worker_->on_active_message(handler.id, receive, &handler));
  }
  return {};
}

void UcxBackend::on_message(AmId id, std::string_view bytes, ucp_ep_h reply_ep) {
  switch (id) {
    case kHelloAm:
      if (auto hello = checked(decode<Hello>(bytes, "handshake"), "handshake"); hello && reply_ep != nullptr)
        on_hello(*hello, sender_of(hello->secret), reply_ep);
      break;
    case kWelcomeAm:
      if (auto welcome = checked(decode<Welcome>(bytes, "answer to a handshake"), "answer to a handshake"))
        on_welcome(*welcome);
      break;
    case kNotificationAm:
      if (auto note = checked(decode<NotificationMessage>(bytes, "notification"), "notification");
          note && sender_of(note->secret).is_accepted())
        on_notification(std::move(*note));
      break;
    case kPingAm:
      if (auto ping = checked(decode<Ping>(bytes, "ping"), "ping");
          ping && reply_ep != nullptr && sender_of(ping->secret).is_accepted())
        static_cast<void>(worker_->send(reply_ep, kPongAm, encode(Ping{ping->token, ""}), false));
      break;
    case kPongAm:
      if (auto pong = checked(decode<Ping>(bytes, "answer to a ping"), "answer to a ping")) {
        if (UcxPeer* const peer = find_peer(pong->token)) peer->note_life(clock_.now());
      }
      break;
    case kBlocksAm:
      if (reply_ep != nullptr) on_blocks(bytes, reply_ep);
      break;
    case kAnswerAm:
      on_answer(bytes);
      break;
  }
}

void UcxBackend::on_hello(const Hello& hello, const SecretCheck& sender, ucp_ep_h reply_ep) {
  if (sender.kind == SecretCheck::Kind::kUnknown) return;
  Welcome welcome{hello.token, ""};
  if (hello.protocol_version != kProtocolVersion)
    welcome.refusal = fmt::format(
        "the peer's UCX protocol has version {}, this side has version {}; run the same kvferry release on both",
        kProtocolVersion, hello.protocol_version);
  else if (hello.to_incarnation != incarnation_)
    welcome.refusal = "another process has this address now, because the peer has ended or restarted";
  else if (!sender.is_accepted())
    welcome.refusal = kAddressRevoked;
  static_cast<void>(worker_->send(reply_ep, kWelcomeAm, encode(welcome), false));
}

void UcxBackend::on_welcome(const Welcome& welcome) {
  if (UcxPeer* const peer = find_peer(welcome.token)) peer->on_welcome(welcome);
}

SecretCheck UcxBackend::sender_of(const std::string& secret) {
  SecretCheck sender = secret_.check(secret);
  if (!sender.is_accepted() && std::has_single_bit(++num_uninvited_messages_))
    log().warn("transport: refused a UCX message of a sender that {} ({} refused so far)",
               sender.kind == SecretCheck::Kind::kUnknown
                   ? "is unknown, since it lacks the secret of this node's address"
                   : "was given this node's address under a key that is not accepted",
               num_uninvited_messages_);
  return sender;
}

UcxPeer* UcxBackend::find_peer(std::uint64_t token) {
  for (const auto& [id, entry] : peers_) {
    if (entry.peer->token() == token) return entry.peer.get();
  }
  return nullptr;
}

void UcxBackend::on_notification(NotificationMessage message) {
  if (!table_.completion_queue().notify({std::move(message.from), std::move(message.body)}))
    log().error("transport: dropped a peer's notification, because this process has {} unread ones, which is the limit",
                CompletionQueue::kNotificationsMax);
}

void UcxBackend::on_blocks(std::string_view packed, ucp_ep_h reply_ep) {
  auto read = checked(read_packed<BlocksMessage>(packed, "request to copy blocks"), "request to copy blocks");
  if (!read) return;
  auto& [message, payload] = *read;
  const SecretCheck sender = sender_of(message.secret);
  if (sender.kind == SecretCheck::Kind::kUnknown) return;
  // No correct peer requests this much without reading the answers, so this peer gets no answer.
  if (worker_->unsent_bytes(reply_ep) > kUnsentBytesMax) return;
  if (!sender.is_accepted()) {
    const std::string answer = refuse(message, ErrorCode::kRefused, std::string(kAddressRevoked));
    static_cast<void>(worker_->send(reply_ep, kAnswerAm, answer, false));
    return;
  }
  const auto memory = memories_.find(RegionId{message.region});
  if (memory != memories_.end() && memory->second.device != nullptr) {
    static_cast<void>(worker_->send(
        reply_ep, kAnswerAm,
        refuse(message, ErrorCode::kRefused,
               fmt::format("the peer's region {} is GPU memory, which UCX can't send in messages", message.region)),
        false));
    return;
  }
  bool is_served = false;
  std::string answer = serve(table_, message, payload, sender.member, is_served);
  if (is_served && !message.notification.empty())
    on_notification({std::move(message.from), std::move(message.notification), {}});
  static_cast<void>(worker_->send(reply_ep, kAnswerAm, std::move(answer), false));
}

void UcxBackend::on_answer(std::string_view packed) {
  auto read = checked(read_packed<BlocksAnswer>(packed, "answer with blocks"), "answer with blocks");
  if (!read) return;
  // A transfer that has ended has removed its messages from pending_messages_, so answers to them are dropped.
  if (const auto message = pending_messages_.take(read->first.token))
    message->transfer->on_answer(message->pieces, read->first, read->second);
}

}  // namespace kvferry::ucx
