// Interface between one backend of the transport and the code that all backends share (backend_transport.h).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "transport/base/clock.h"
#include "transport/base/wire.h"
#include "transport/transfer_table.h"
#include "transport/transport.h"

namespace kvferry {

/// One implementation of a transport. It owns the connections and the progress thread. BackendTransport checks
/// transfers against the transfer table, posts tasks in the order of the calls, and calls the methods below. A virtual
/// method without a comment implements the method of Transport with the same name.
class Backend {
 public:
  using Task = std::function<void()>;

  explicit Backend(std::uint32_t transfers_max);
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  TransferTable& table() { return table_; }
  std::uint64_t incarnation() const { return incarnation_; }

  // ---- Any thread may call these methods. After join(), only a backend whose post() runs tasks at once then may call
  // post() and post_and_wait(). ----

  virtual std::string address() const = 0;
  virtual std::string describe() const = 0;
  /// Returns the incarnation in a peer's address. kInvalidArgument: the address is malformed, of another protocol
  /// version, or of a peer that this backend can't reach.
  virtual Result<std::uint64_t> check_address(const std::string& address) = 0;

  /// Queues a task, which may use the progress thread's state. A backend may run the task at once instead, if no other
  /// thread uses that state. Tasks run in the order of the calls.
  virtual void post(Task task) = 0;
  /// Posts a task and returns when the task has run.
  void post_and_wait(const Task& task);
  /// Waits until the progress thread has ended and every posted task has run. The caller must have posted a task that
  /// calls stop().
  virtual void join() = 0;

  /// Implements Transport::wait(). This default sleeps until the completion queue's descriptor or a descriptor that was
  /// passed to set_wait_interrupt_fd() is readable, or the time has passed.
  virtual bool wait(TimeNs timeout_ns) { return table_.completion_queue().wait(timeout_ns, interrupt_fds_); }
  virtual void set_wait_interrupt_fd(int fd) { interrupt_fds_.push_back(fd); }

  // ---- Any thread may call these methods, one call at a time. ----

  struct RegionKey {
    std::string rkey;        // RegionDescriptor::rkey; only this backend interprets it
    bool is_device = false;  // true for GPU memory
  };
  /// Makes memory reachable as region `id`. kUnavailable: this backend can't reach memory of this kind.
  virtual Result<RegionKey> open_region(RegionId id, const MemoryRegion& memory) = 0;
  /// Implements Transport::unregister_region(). `is_stopped`: whether the progress thread has ended.
  virtual Result<void> close_region(RegionId id, bool is_stopped);
  virtual Result<GrantId> grant(RegionId region, std::uint64_t offset, std::uint64_t bytes, const GrantTerms& terms);
  virtual Result<void> revoke(GrantId grant) { return table_.remove_grant(grant); }

  // ---- Called only from tasks passed to post(). ----

  /// Adds a peer, whose `address` has passed check_address().
  virtual void add_peer(PeerId peer, const std::string& address) = 0;
  /// Removes a peer. Each of its transfers ends with kPeerLost, unless it ends in another way before.
  virtual void drop_peer(PeerId peer) = 0;
  virtual void submit(AcceptedTransfer transfer) = 0;
  /// Adds copies to a transfer; does nothing if the transfer has ended.
  virtual void feed(FedCopies more) = 0;
  virtual void cancel(PeerId peer, TransferId id) = 0;
  virtual void set_source_address(const std::string& address) { source_address_ = address; }
  /// Ends all transfers with kCancelled, and then the progress thread. Called by the last task that is posted.
  virtual void stop() = 0;

 protected:
  static std::uint64_t random_number();

  const SteadyClock clock_;
  TransferTable table_;
  const std::uint64_t incarnation_;
  std::string source_address_;  // Notification::from of the notifications that this node sends

 private:
  std::vector<int> interrupt_fds_;  // descriptors that end wait() when readable; none is added after the first wait()
};

/// Returns bytes that no peer can guess.
std::string random_bytes(std::size_t num_bytes);

/// Compares two secrets. For texts of the same length, the time taken does not reveal how much of a wrong secret is
/// right.
bool is_same_secret(std::string_view said, std::string_view own);

/// Returns the peer's reason for refusing a transfer, printable and cut to kPeerTextMax bytes, or a text that says that
/// the peer gave no reason.
std::string refusal_text(const std::string& reason);

/// A number among a backend's options, and the range that it must be in.
struct OptionCheck {
  template <class Number>
  OptionCheck(std::string_view option, Number number, std::int64_t from = 1,
              std::int64_t to = std::numeric_limits<std::int64_t>::max())
      : name(option),
        value(std::in_range<std::int64_t>(number) ? static_cast<std::int64_t>(number)
                                                  : std::numeric_limits<std::int64_t>::max()),
        least(from),
        most(to) {}
  std::string_view name;
  std::int64_t value, least, most;
};
/// Returns kInvalidArgument if a number is out of its range; the message names the first one. `options`: whose
/// options these are, such as "the TCP backend".
Result<void> check_options(std::string_view options, const std::vector<OptionCheck>& checks);

/// Decodes a peer's address, whose first field is its protocol version. kInvalidArgument: the address is malformed or
/// of another version than `protocol_version`.
template <class Address>
Result<Address> read_address(const std::string& bytes, std::uint32_t protocol_version, std::string_view protocol) {
  Result<Address> address = decode<Address>(bytes, "peer address");
  if (!address) return Error{ErrorCode::kInvalidArgument, std::move(address.error().what)};
  if (address->protocol_version != protocol_version)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("the peer's address is of {} protocol version {}, this side has version {}; run the same kvferry "
                    "release on both",
                    protocol, address->protocol_version, protocol_version)};
  return address;
}

}  // namespace kvferry
