#include "transport/nccl/nccl_backend.h"

#include <algorithm>
#include <utility>

#include "transport/backend_transport.h"
#include "transport/base/printable.h"
#include "transport/nccl/communicators.h"

namespace kvferry::nccl {
namespace {

constexpr std::size_t kInboundMax = 4096;
// The device's progress has no descriptor to wait for, so it is polled. The longer nothing has happened, the longer is
// the time between two polls.
constexpr TimeNs kPollMinNs = 20'000;
constexpr TimeNs kPollMaxNs = kMillisecond;
constexpr TimeNs kPollShare = 8;
constexpr TimeNs kFlushNs = 200 * kMillisecond;  // limit on the time for sending the last messages at shutdown

}  // namespace

NcclBackend::NcclBackend(const NcclOptions& options, std::unique_ptr<Communicators> communicators,
                         std::unique_ptr<ControlPlane> control)
    : InboxBackend(options.transfers_max),
      options_(options),
      communicators_(std::move(communicators)),
      control_(std::move(control)),
      staging_(*options.device),
      context_{options_, *options.device, staging_, *communicators_, *control_, table_, "", clock_.now()},
      address_(encode(Address{kProtocolVersion, incarnation_, control_->address()})) {
  context_.source_address = address_;
  thread_ = std::thread([this] {
    // An error can be ignored here: if the GPU can't be used, transfers fail when they use it, and report the reason.
    static_cast<void>(context_.device.bind_thread());
    take_turns("kvferry-nccl");
    control_->shut_down();
  });
}

NcclBackend::~NcclBackend() {
  join();
  for (const auto& [region, memory] : pinned_) context_.device.unpin(memory);
}

std::string NcclBackend::describe() const {
  return fmt::format("{} from and to {}; control link: {}", communicators_->describe(), context_.device.describe(),
                     control_->describe());
}

Result<std::uint64_t> NcclBackend::check_address(const std::string& address) {
  return KVFERRY_TRY(read_address<Address>(address, kProtocolVersion, "NCCL")).incarnation;
}

Result<Backend::RegionKey> NcclBackend::open_region(RegionId id, const MemoryRegion& memory) {
  Device& device = context_.device;
  if (memory.device != nullptr && memory.device != &device)
    return Error{ErrorCode::kUnavailable, fmt::format("the nccl backend of {} can't reach memory of {}",
                                                      device.describe(), memory.device->describe())};
  if (memory.device == nullptr) {
    const std::span<std::byte> host(static_cast<std::byte*>(memory.base), memory.bytes);
    if (Result<void> ok = device.pin(host); !ok) return std::move(ok).error().with("cannot pin memory for NCCL");
    pinned_.emplace(id, host);
  }
  return RegionKey{};
}

Result<void> NcclBackend::close_region(RegionId id, bool) {
  KVFERRY_TRY(table_.remove_region(id));
  if (const auto pinned = pinned_.extract(id)) context_.device.unpin(pinned.mapped());
  return {};
}

bool NcclBackend::turn() {
  context_.now = now_ = clock_.now();
  bool is_busy = inbox_.run();
  for (const ControlPlane::Incoming& incoming : control_->advance(now_)) {
    dispatch(incoming);
    is_busy = true;
  }
  advance_links();
  return is_busy;
}

void NcclBackend::advance_links() {
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

bool NcclBackend::needs_polling() const {
  const auto needs = [](const auto& link) { return link->needs_polling(); };
  return std::any_of(outbound_.begin(), outbound_.end(), [&](const auto& entry) { return needs(entry.second); }) ||
         std::any_of(dropped_.begin(), dropped_.end(), needs) || std::any_of(inbound_.begin(), inbound_.end(), needs);
}

bool NcclBackend::is_over() const {
  if (!is_stopping_ || !dropped_.empty() || !inbound_.empty()) return false;
  const auto is_quiet = [](const auto& entry) { return entry.second->is_quiet() && entry.second->is_empty(); };
  return std::all_of(outbound_.begin(), outbound_.end(), is_quiet) && (control_->is_flushed() || now_ >= stop_until_);
}

void NcclBackend::idle(TimeNs busy_at) {
  const bool polls = needs_polling();
  if ((polls && now_ - busy_at < options_.spin_ns) || !inbox_.prepare_to_sleep()) return;
  TimeNs deadline = is_stopping_ ? now_ + kMillisecond : INT64_MAX;
  for (const auto& [peer, link] : outbound_) deadline = std::min(deadline, link->next_deadline());
  for (const auto& link : inbound_) deadline = std::min(deadline, link->next_deadline());
  if (polls) deadline = std::min(deadline, now_ + std::clamp((now_ - busy_at) / kPollShare, kPollMinNs, kPollMaxNs));
  sleep(control_->event_fd(), std::clamp<TimeNs>(deadline - now_, 0, 60 * kSecond));
}

void NcclBackend::dispatch(const ControlPlane::Incoming& incoming) {
  const std::optional<Message> message = read_message(incoming.message);
  if (!message) return;
  const auto found = sessions_.find(message->session);
  if (found == sessions_.end()) {
    if (message->kind == Kind::kHello || message->kind == Kind::kPing) welcome(*message, incoming);
    return;
  }
  const Session& session = found->second;
  Link& link = *session.link;
  if (session.from != incoming.from || (session.member && session.member != incoming.member) || link.is_lost()) return;
  if (message->kind == Kind::kBye) {
    const Result<Bye> bye = decode<Bye>(message->body, "last message of the peer");
    return link.lose("the peer ended the connection: " + (bye ? printable(bye->why, kPeerTextMax) : bye.error().what),
                     false);
  }
  if (Result<void> ok = link.on_message(*message); !ok) link.lose(ok.error().what);
}

void NcclBackend::welcome(const Message& message, const ControlPlane::Incoming& incoming) {
  const bool is_hello = message.kind == Kind::kHello;
  Result<Hello> hello = decode<Hello>(message.body, "hello");
  Result<ControlAddress> address =
      is_hello && hello ? Result<ControlAddress>(hello->from) : decode<ControlAddress>(message.body, "control address");
  if (!address || address->address != incoming.from) return;
  ControlPeerPtr peer = control_->reach(*address, context_.now);
  const auto refuse = [&](const std::string& why) {
    control_->send(*peer, pack_message(message.session, Kind::kBye, encode(Bye{why})));
  };
  if (!is_hello) return refuse("the peer does not know this connection; it may have restarted");
  if (hello->protocol_version != kProtocolVersion)
    return refuse(fmt::format(
        "the peer's NCCL protocol has version {}, this side has version {}; run the same kvferry release on both",
        kProtocolVersion, hello->protocol_version));
  if (is_stopping_) return refuse("the process that accepted the connection shuts its transport down");
  if (inbound_.size() >= kInboundMax)
    return refuse(fmt::format("the peer has the limit of {} connections and takes no more", kInboundMax));
  inbound_.push_back(std::make_unique<InboundLink>(context_, message.session, std::move(peer), incoming.member));
  sessions_[message.session] = {inbound_.back().get(), incoming.from, incoming.member};
}

void NcclBackend::add_peer(PeerId peer, const std::string& bytes) {
  const Address address = decode<Address>(bytes, "peer address").value();
  const std::uint64_t session = random_number();
  auto link = std::make_unique<OutboundLink>(context_, peer, session, control_->reach(address.control, context_.now));
  sessions_[session] = {link.get(), address.control.address};
  outbound_.emplace(peer, std::move(link));
}

void NcclBackend::drop_peer(PeerId peer) {
  auto link = std::move(outbound_.extract(peer).mapped());
  link->end(ErrorCode::kPeerLost, "the process that made the connection has ended it");
  dropped_.push_back(std::move(link));
}

void NcclBackend::submit(AcceptedTransfer transfer) {
  const auto& link = outbound_.at(transfer.peer);
  link->submit(std::move(transfer));
}

void NcclBackend::feed(FedCopies more) {
  if (const auto link = outbound_.find(more.peer); link != outbound_.end()) link->second->feed(more);
}

void NcclBackend::cancel(PeerId peer, TransferId id) {
  if (const auto link = outbound_.find(peer); link != outbound_.end()) link->second->cancel(id);
}

void NcclBackend::stop() {
  is_stopping_ = true;
  stop_until_ = context_.now + kFlushNs;
  for (const auto& [peer, link] : outbound_)
    link->end(ErrorCode::kCancelled, "the process that made the connection shuts its transport down");
  for (const auto& link : inbound_) link->lose("the process that accepted the connection shuts its transport down");
}

namespace {

Result<void> check(const NcclOptions& options) {
  constexpr std::uint32_t kPiecesMax = kServedMax / 2;
  if (options.device == nullptr)
    return Error{ErrorCode::kInvalidArgument, "path nccl needs a GPU, but this process was given no device"};
  return check_options("the NCCL backend", {{"transfers_max", options.transfers_max},
                                            {"piece_bytes", options.piece_bytes, 1, kPieceBytesMax},
                                            {"pieces_per_peer_max", options.pieces_per_peer_max, 1, kPiecesMax},
                                            {"spin_ns", options.spin_ns, 0},
                                            {"silence_ns", options.silence_ns, kMillisecond},
                                            {"stuck_ns", options.stuck_ns},
                                            {"hung_ns", options.hung_ns}});
}

}  // namespace

Result<std::unique_ptr<Transport>> make_transport_over(std::unique_ptr<Communicators> communicators,
                                                       const NcclOptions& options) {
  KVFERRY_TRY(check(options));
  TcpOptions control = options.control;
  control.silence_ns = options.silence_ns;
  control.spin_ns = options.spin_ns;
  control.key = options.key;
  std::unique_ptr<ControlPlane> plane = KVFERRY_TRY(ControlPlane::open(control));
  auto backend = std::make_unique<NcclBackend>(options, std::move(communicators), std::move(plane));
  return std::unique_ptr<Transport>(std::make_unique<BackendTransport>(std::move(backend)));
}

}  // namespace kvferry::nccl

namespace kvferry {

Result<std::unique_ptr<Transport>> make_nccl_transport(const NcclOptions& options) {
  KVFERRY_TRY(nccl::check(options));
  std::unique_ptr<nccl::Communicators> communicators = KVFERRY_TRY(nccl::open_nccl(options.library, *options.device));
  return nccl::make_transport_over(std::move(communicators), options);
}

}  // namespace kvferry
