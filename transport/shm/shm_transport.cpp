// The side of the shared memory transport that any thread may call: checks, books, and tasks for the loop.
#include <fcntl.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "transport/base/check.h"
#include "transport/make_transport.h"
#include "transport/shm/shm_engine.h"

namespace kvferry {
namespace {

class ShmTransport final : public Transport {
 public:
  ShmTransport(const ShmOptions& options, std::uint64_t incarnation)
      : incarnation_(incarnation), table_(options.transfers_max), engine_(options, incarnation, table_) {}
  ~ShmTransport() override { shutdown(); }

  Result<void> open() { return engine_.open(); }

  std::string address() const override { return encode(engine_.address()); }
  std::string describe() const override { return engine_.describe(); }

  Result<RegionId> register_region(const MemoryRegion& memory) override {
    if (Result<void> ok = TransferTable::check_host_region(memory, "shared memory"); !ok) return std::move(ok).error();
    if (is_stopped_) return TransferTable::is_shut_down();
    OwnedFd fd;
    if (memory.fd >= 0) {
      fd = OwnedFd(::fcntl(memory.fd, F_DUPFD_CLOEXEC, 0));
      if (!fd)
        return Error{ErrorCode::kInvalidArgument,
                     fmt::format("descriptor {} of the memory to register can't be duplicated", memory.fd)};
    }
    const RegionId id = table_.new_region_id();
    const Result<std::uint32_t> slot = reserve_slot();
    if (!slot) return slot.error();
    const auto base = reinterpret_cast<std::uintptr_t>(memory.base);
    const RegionDescriptor descriptor{incarnation_, base, memory.bytes, encode(shm::RegionKey{bool{fd}, base, *slot}),
                                      id.value};
    engine_.loop().call_and_wait([&] {
      if (fd) engine_.add_region(id, std::move(fd), memory.fd_offset, memory.bytes);
      engine_.open_slot(*slot, id, GrantId{});
    });
    table_.add_region(id, memory.base, memory.bytes, encode(descriptor));
    return id;
  }

  Result<std::string> export_region(RegionId region) const override { return table_.exported(region); }

  Result<void> unregister_region(RegionId region) override {
    const std::lock_guard lock(grants_mutex_);
    for (auto lent = lent_.begin(); lent != lent_.end();) {
      const bool is_of_region = lent->second.region == region;
      if (is_of_region && !close(lent->second.slot)) return is_busy(lent->first);
      lent = is_of_region ? lent_.erase(lent) : std::next(lent);
    }
    const Result<std::string> exported = table_.exported(region);
    if (!exported) return Error{ErrorCode::kInvalidArgument, exported.error().what};
    const std::uint32_t slot = key_of(*exported).slot;
    bool is_quiet = false;
    engine_.loop().call_and_wait([&] { is_quiet = engine_.close_slot(slot); });
    if (!is_quiet)
      return Error{ErrorCode::kFull,
                   fmt::format("a peer is in the middle of a copy with region {}; try again", region)};
    if (Result<void> ok = table_.remove_region(region); !ok) return ok;
    engine_.loop().call_and_wait([&] {
      engine_.remove_region(region);
      engine_.free_slot(slot);
    });
    return {};
  }

  Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes) override {
    const std::lock_guard lock(grants_mutex_);
    const Result<std::string> exported = table_.exported(region);
    if (!exported) return Error{exported.error().code, exported.error().what};
    const Result<std::uint32_t> slot = reserve_slot();
    if (!slot) return slot.error();
    shm::RegionKey key = key_of(*exported);
    key.slot = *slot;
    Result<GrantId> id = table_.add_grant(region, offset, bytes, encode(key));
    engine_.loop().call_and_wait([&] { id ? engine_.open_slot(*slot, region, *id) : engine_.free_slot(*slot); });
    if (id) lent_.emplace(*id, Lent{region, *slot});
    return id;
  }
  Result<std::string> export_grant(GrantId grant) const override { return table_.exported(grant); }

  Result<void> revoke(GrantId grant) override {
    const std::lock_guard lock(grants_mutex_);
    const auto lent = lent_.find(grant);
    if (lent == lent_.end()) return Error{ErrorCode::kInvalidArgument, fmt::format("grant {} is not out", grant)};
    if (!close(lent->second.slot)) return is_busy(grant);
    lent_.erase(lent);
    return table_.remove_grant(grant);
  }

  Result<PeerId> connect(const std::string& address) override {
    Result<shm::Address> parsed = decode<shm::Address>(address, "peer address");
    if (!parsed) return Error{ErrorCode::kInvalidArgument, std::move(parsed.error().what)};
    if (parsed->protocol_version != shm::kProtocolVersion)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("the peer address is of shared memory protocol {}; this side speaks {}",
                               parsed->protocol_version, shm::kProtocolVersion)};
    if (parsed->host != engine_.address().host)
      return Error{ErrorCode::kInvalidArgument, "the peer is on another host or in another network namespace"};
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    const TransferTable::Connected connected = table_.connect(address, parsed->incarnation);
    if (connected.is_new)
      engine_.loop().call([this, peer = connected.peer, to = std::move(*parsed)] { engine_.add_peer(peer, to); });
    return connected.peer;
  }

  void disconnect(PeerId peer) override {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_ && table_.forget_peer(peer)) engine_.loop().call([this, peer] { engine_.drop_peer(peer); });
  }

  Result<TransferId> submit(PagedTransfer transfer) override {
    const std::lock_guard lock(mutex_);
    if (is_stopped_) return TransferTable::is_shut_down();
    Result<AcceptedTransfer> accepted = table_.accept(std::move(transfer));
    if (!accepted) return std::move(accepted).error();
    const TransferId id = accepted->id;
    // shared, because a std::function must be able to copy what it holds
    engine_.loop().call([this, shared = std::make_shared<AcceptedTransfer>(std::move(*accepted))] {
      engine_.submit(std::move(*shared));
    });
    return id;
  }

  Result<void> feed(TransferId id, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                    bool is_last) override {
    const std::lock_guard lock(mutex_);
    Result<FedCopies> fed = table_.feed(id, ranges, std::move(checksums), is_last);
    if (!fed) return std::move(fed).error();
    engine_.loop().call([this, id, more = std::move(*fed)] { engine_.feed(id, more); });
    return {};
  }

  void cancel(TransferId id) override {
    const std::lock_guard lock(mutex_);
    if (!is_stopped_ && table_.request_cancel(id)) engine_.loop().call([this, id] { engine_.cancel(id); });
  }

  std::vector<Completion> poll() override { return table_.completion_queue().take_completions(); }
  std::vector<Notification> poll_notifications() override { return table_.completion_queue().take_notifications(); }
  int event_fd() const override { return table_.completion_queue().event_fd(); }

  bool wait(TimeNs timeout_ns) override {
    const CompletionQueue& completion_queue = table_.completion_queue();
    if (completion_queue.has_something()) return true;
    const auto driven = engine_.loop().drive(timeout_ns, [&] { return completion_queue.has_something(); });
    return driven ? *driven : Transport::wait(timeout_ns);
  }

  bool set_wait_interrupt_fd(int fd) override {
    engine_.loop().add_wakeup_fd(fd);
    return true;
  }
  void set_source_address(const std::string& address) override {
    engine_.loop().call_and_wait([&] { engine_.set_source_address(address); });
  }

  void shutdown() override {
    const std::lock_guard joining(join_mutex_);
    {
      const std::lock_guard lock(mutex_);
      if (!is_stopped_.exchange(true)) engine_.loop().call([this] { engine_.shut_down(); });
    }
    engine_.loop().stop();
    KVFERRY_CHECK(table_.num_open() == 0, "{} transfers were shut down without a completion", table_.num_open());
  }

 private:
  struct Lent {
    RegionId region;
    std::uint32_t slot = 0;
  };

  static shm::RegionKey key_of(const std::string& descriptor) {
    const std::string rkey = decode<RegionDescriptor>(descriptor, "own descriptor").value().rkey;
    return decode<shm::RegionKey>(rkey, "own key").value();
  }
  Result<std::uint32_t> reserve_slot() {
    Result<std::uint32_t> slot = 0;
    engine_.loop().call_and_wait([&] { slot = engine_.reserve_slot(); });
    return slot;
  }
  /// False: a peer copies at this moment.
  bool close(std::uint32_t slot) {
    bool is_quiet = false;
    engine_.loop().call_and_wait([&] {
      is_quiet = engine_.close_slot(slot);
      if (is_quiet) engine_.free_slot(slot);
    });
    return is_quiet;
  }
  static Error is_busy(GrantId grant) {
    return Error{ErrorCode::kFull, fmt::format("a peer is in the middle of a copy by grant {}; ask again", grant)};
  }

  const std::uint64_t incarnation_;
  TransferTable table_;
  shm::ShmEngine engine_;  // after the transfer_table, which it refers to
  std::mutex join_mutex_;
  std::mutex mutex_;  // keeps the order of tasks that of the books, and the shutdown last
  std::atomic<bool> is_stopped_{false};
  std::mutex grants_mutex_;
  std::unordered_map<GrantId, Lent> lent_;
};

}  // namespace

Result<std::unique_ptr<Transport>> make_shm_transport(const ShmOptions& options) {
  if (options.transfers_max == 0 || options.spin_ns < 0 || options.silence_ns <= 0)
    return Error{ErrorCode::kInvalidArgument,
                 "bad ShmOptions: transfers_max and silence_ns must be at least 1, spin_ns at least 0"};
  auto transport = std::make_unique<ShmTransport>(options, TransferTable::random_incarnation());
  if (Result<void> ok = transport->open(); !ok) return std::move(ok).error();
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace kvferry
