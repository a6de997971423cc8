#include "transport/backend_transport.h"

#include <future>
#include <random>
#include <utility>

#include "transport/base/check.h"
#include "transport/base/printable.h"

namespace kvferry {

constexpr std::size_t kGrantSecretBytes = 32;

Backend::Backend(std::uint32_t transfers_max)
    : table_(transfers_max, SecretNumbers(random_bytes(kGrantSecretBytes)), clock_), incarnation_(random_number()) {}

std::uint64_t Backend::random_number() {
  std::random_device random;
  return (std::uint64_t{random()} << 32) | random();
}

std::string random_bytes(std::size_t num_bytes) {
  std::random_device random;
  std::string bytes(num_bytes, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

bool is_same_secret(std::string_view said, std::string_view own) {
  if (said.size() != own.size()) return false;
  unsigned difference = 0;
  for (std::size_t at = 0; at < own.size(); ++at)
    difference |= static_cast<unsigned char>(said[at]) ^ static_cast<unsigned>(static_cast<unsigned char>(own[at]));
  return difference == 0;
}

std::string refusal_text(const std::string& reason) {
  return reason.empty() ? "the peer refused the transfer and gave no reason" : printable(reason, kPeerTextMax);
}

Result<void> check_options(std::string_view options, const std::vector<OptionCheck>& checks) {
  for (const OptionCheck& check : checks) {
    if (check.value >= check.least && check.value <= check.most) continue;
    const bool is_bounded = check.most < std::numeric_limits<std::int64_t>::max();
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("option {} of {} is {}; allowed: {}{}", check.name, options, check.value, check.least,
                             is_bounded ? fmt::format(" to {}", check.most) : " and more")};
  }
  return {};
}

void Backend::post_and_wait(const Task& task) {
  std::promise<void> done;
  post([&] {
    task();
    done.set_value();
  });
  done.get_future().wait();
}

Result<void> Backend::close_region(RegionId id, bool) { return table_.remove_region(id); }

Result<GrantId> Backend::grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms) {
  return table_.add_grant(region, offset, bytes, terms, "");
}

Result<RegionId> BackendTransport::register_region(const MemoryRegion& memory) {
  KVFERRY_TRY(TransferTable::check_region(memory.base, memory.bytes));
  const std::lock_guard lock(memory_mutex_);
  if (is_stopped_) return TransferTable::is_shut_down();
  const RegionId id = table().new_region_id();
  Backend::RegionKey key = KVFERRY_TRY(backend_->open_region(id, memory));
  const RegionDescriptor descriptor{.incarnation = backend_->incarnation(),
                                    .base = reinterpret_cast<std::uintptr_t>(memory.base),
                                    .bytes = memory.bytes,
                                    .rkey = std::move(key.rkey),
                                    .region = id.value,
                                    .is_device = key.is_device};
  table().add_region(id, memory, encode(descriptor));
  return id;
}

Result<void> BackendTransport::unregister_region(RegionId region) {
  const std::lock_guard lock(memory_mutex_);
  return backend_->close_region(region, is_stopped_);
}

Result<GrantId> BackendTransport::grant(RegionId region, std::uint64_t offset, std::uint64_t bytes,
                                        const GrantTerms& terms) {
  const std::lock_guard lock(memory_mutex_);
  return backend_->grant(region, offset, bytes, terms);
}

Result<void> BackendTransport::revoke(GrantId grant) {
  const std::lock_guard lock(memory_mutex_);
  return backend_->revoke(grant);
}

Result<PeerId> BackendTransport::connect(const std::string& address) {
  const std::lock_guard lock(order_mutex_);
  if (is_stopped_) return TransferTable::is_shut_down();
  const std::uint64_t incarnation = KVFERRY_TRY(backend_->check_address(address));
  const TransferTable::Connected connected = table().connect(address, incarnation);
  if (connected.is_new) backend_->post([this, peer = connected.peer, address] { backend_->add_peer(peer, address); });
  return connected.peer;
}

void BackendTransport::disconnect(PeerId peer) {
  const std::lock_guard lock(order_mutex_);
  if (!is_stopped_ && table().remove_peer(peer)) backend_->post([this, peer] { backend_->drop_peer(peer); });
}

Result<TransferId> BackendTransport::submit(PagedTransfer transfer) {
  const std::lock_guard lock(order_mutex_);
  if (is_stopped_) return TransferTable::is_shut_down();
  Result<AcceptedTransfer> accepted = table().accept(std::move(transfer));
  if (!accepted) return std::move(accepted).error();
  const TransferId id = accepted->id;
  backend_->post([this, one = std::move(*accepted)]() mutable { backend_->submit(std::move(one)); });
  return id;
}

Result<void> BackendTransport::feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                                    bool is_last) {
  const std::lock_guard lock(order_mutex_);
  if (is_stopped_) return TransferTable::is_shut_down();
  Result<FedCopies> fed = table().feed(id, std::move(ranges), std::move(checksums), is_last);
  if (!fed) return std::move(fed).error();
  backend_->post([this, more = std::move(*fed)]() mutable { backend_->feed(std::move(more)); });
  return {};
}

void BackendTransport::cancel(TransferId id) {
  const std::lock_guard lock(order_mutex_);
  if (is_stopped_) return;
  if (const std::optional<PeerId> peer = table().request_cancel(id))
    backend_->post([this, peer = *peer, id] { backend_->cancel(peer, id); });
}

void BackendTransport::set_source_address(const std::string& address) {
  const std::lock_guard lock(order_mutex_);
  if (!is_stopped_) backend_->post([this, address] { backend_->set_source_address(address); });
}

void BackendTransport::shutdown() {
  // The lock is held to the end, so that a concurrent second call also returns only after the thread has ended.
  const std::lock_guard lock(memory_mutex_);
  {
    const std::lock_guard order(order_mutex_);
    if (std::exchange(is_stopped_, true)) return;
    backend_->post([this] { backend_->stop(); });
  }
  backend_->join();
  KVFERRY_CHECK(table().num_open() == 0, "the transport was shut down, but {} transfers have not ended",
                table().num_open());
}

}  // namespace kvferry
