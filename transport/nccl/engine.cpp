#include "transport/nccl/engine.h"

#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <random>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/log.h"

namespace kvferry::nccl {
namespace {

constexpr std::size_t kInboundMax = 4096;
// What the device does announces itself to nobody. The longer nothing has happened, the more rarely it is asked.
constexpr TimeNs kPollMinNs = 20'000;
constexpr TimeNs kPollMaxNs = kMillisecond;
constexpr TimeNs kPollShare = 8;
constexpr TimeNs kFarewellNs = 200 * kMillisecond;  // for the last messages, when the transport ends

std::uint64_t random_session() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

}  // namespace

Engine::Engine(const NcclOptions& options, TransferTable& transfer_table, std::unique_ptr<Communicators> communicators,
               std::unique_ptr<ControlPlane> control)
    : options_(options),
      communicators_(std::move(communicators)),
      control_(std::move(control)),
      staging_(*options.device),
      context_{options_, *options_.device, staging_, *communicators_, *control_, transfer_table, "", clock_.now()} {}

Engine::~Engine() { join(); }

void Engine::start() { thread_ = std::thread(&Engine::run, this); }

void Engine::join() {
  if (thread_.joinable()) thread_.join();
}

std::string Engine::describe() const {
  return fmt::format("{} carries the bytes from and to {}; control link: {}", communicators_->describe(),
                     context_.device.describe(), control_->describe());
}

void Engine::run() {
  ::pthread_setname_np(::pthread_self(), "kvferry-nccl");
  TimeNs busy_at = clock_.now();
  while (true) {
    context_.now = clock_.now();
    inbox_.wake().clear();
    bool is_busy = inbox_.run();
    for (const ControlPlane::Incoming& incoming : control_->advance(context_.now)) {
      dispatch(incoming);
      is_busy = true;
    }
    advance_links();
    if (is_stopping_ && is_quiet(context_.now)) break;
    if (is_busy) busy_at = context_.now;
    const bool polls = needs_polling();
    if (!is_busy && (!polls || context_.now - busy_at >= options_.spin_ns)) sleep(context_.now, busy_at, polls);
  }
  control_->shut_down();
}

void Engine::advance_links() {
  for (const auto& [peer, link] : outbound_) link->advance();
  for (const auto& link : dropped_) link->advance();
  for (const auto& link : inbound_) link->advance();
  const auto is_over = [this](const auto& link) {
    if (!link->is_quiet()) return false;
    sessions_.erase(link->session());
    return true;
  };
  std::erase_if(dropped_, [&](const auto& link) { return link->is_empty() && is_over(link); });
  std::erase_if(inbound_, is_over);
}

bool Engine::needs_polling() const {
  const auto needs = [](const auto& link) { return link->needs_polling(); };
  return std::any_of(outbound_.begin(), outbound_.end(), [&](const auto& entry) { return needs(entry.second); }) ||
         std::any_of(dropped_.begin(), dropped_.end(), needs) || std::any_of(inbound_.begin(), inbound_.end(), needs);
}

bool Engine::is_quiet(TimeNs now) const {
  const bool is_over =
      dropped_.empty() && inbound_.empty() && std::all_of(outbound_.begin(), outbound_.end(), [](const auto& entry) {
        return entry.second->is_quiet() && entry.second->is_empty();
      });
  return is_over && (control_->is_flushed() || now >= stop_until_);
}

void Engine::sleep(TimeNs now, TimeNs busy_at, bool polls) {
  TimeNs deadline = is_stopping_ ? now + kMillisecond : INT64_MAX;
  for (const auto& [peer, link] : outbound_) deadline = std::min(deadline, link->next_deadline());
  for (const auto& link : inbound_) deadline = std::min(deadline, link->next_deadline());
  if (polls) deadline = std::min(deadline, now + std::clamp((now - busy_at) / kPollShare, kPollMinNs, kPollMaxNs));
  const TimeNs wait_ns = std::clamp<TimeNs>(deadline - now, 0, 60 * kSecond);
  const timespec timeout{wait_ns / kSecond, wait_ns % kSecond};
  pollfd fds[] = {{inbox_.wake().fd(), POLLIN, 0}, {control_->event_fd(), POLLIN, 0}};
  ::ppoll(fds, std::size(fds), &timeout, nullptr);
}

void Engine::dispatch(const ControlPlane::Incoming& incoming) {
  const std::optional<Message> message = read_message(incoming.message);
  if (!message) return;
  const auto found = sessions_.find(message->session);
  if (found == sessions_.end()) {
    if (message->kind == Kind::kHello || message->kind == Kind::kPing) welcome(*message, incoming.from);
    return;
  }
  Link& link = *found->second.link;
  if (found->second.from != incoming.from || link.is_lost()) return;
  if (message->kind == Kind::kBye) {
    const Result<Bye> bye = decode<Bye>(message->body, "farewell");
    return link.lose("the peer ended the session: " + (bye ? bye->why : bye.error().what), false);
  }
  if (Result<void> ok = link.on_message(*message); !ok) link.lose(ok.error().what);
}

void Engine::welcome(const Message& message, const std::string& from) {
  const bool is_hello = message.kind == Kind::kHello;
  Result<Hello> hello = decode<Hello>(message.body, "hello");
  Result<ControlAddress> address =
      is_hello && hello ? Result<ControlAddress>(hello->from) : decode<ControlAddress>(message.body, "control address");
  if (!address || address->address != from) return;
  ControlPeerPtr peer = control_->reach(*address, context_.now);
  const auto refuse = [&](const std::string& why) {
    control_->send(*peer, pack_message(message.session, Kind::kBye, encode(Bye{why})));
  };
  if (!is_hello) return refuse("it is not known here any more");
  if (hello->protocol_version != kProtocolVersion)
    return refuse(fmt::format("the peer speaks protocol {} and not {}", kProtocolVersion, hello->protocol_version));
  if (is_stopping_) return refuse("the transport was shut down");
  if (inbound_.size() >= kInboundMax) return refuse("the peer has too many sessions");
  inbound_.push_back(std::make_unique<InboundLink>(context_, message.session, std::move(peer)));
  sessions_[message.session] = {inbound_.back().get(), from};
}

void Engine::add_peer(PeerId peer, const Address& address) {
  const std::uint64_t session = random_session();
  auto link = std::make_unique<OutboundLink>(context_, peer, session, control_->reach(address.control, context_.now));
  sessions_[session] = {link.get(), address.control.address};
  outbound_.emplace(peer, std::move(link));
}

void Engine::drop_peer(PeerId peer) {
  auto link = std::move(outbound_.extract(peer).mapped());
  link->end(ErrorCode::kPeerLost, "the peer was disconnected");
  dropped_.push_back(std::move(link));
}

void Engine::submit(AcceptedTransfer transfer) {
  const auto found = outbound_.find(transfer.peer);
  KVFERRY_CHECK(found != outbound_.end(), "transfer {} was accepted for an unknown peer", transfer.id);
  found->second->submit(std::move(transfer));
}

void Engine::feed(TransferId id, FedCopies more) {
  for (const auto& [peer, link] : outbound_) {
    if (link->feed(id, more)) return;
  }
}

void Engine::cancel(TransferId id) {
  for (const auto& [peer, link] : outbound_) {
    if (link->cancel(id)) return;
  }
}

void Engine::stop() {
  is_stopping_ = true;
  stop_until_ = context_.now + kFarewellNs;
  for (const auto& [peer, link] : outbound_) link->end(ErrorCode::kCancelled, "the transport was shut down");
  for (const auto& link : inbound_) link->lose("the transport was shut down");
}

}  // namespace kvferry::nccl
