// Memory that two processes of one host share, which saves them system calls: the ring of notifications, and the
// control page with a slot for each region and grant. Positions and lengths that the other process writes there are
// checked before they are used. Private to this folder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "transport/region_descriptor.h"
#include "transport/shared_memory.h"

namespace kvferry::shm {

/// Maps a peer's file. kRefused: `bytes` is 0, the file lacks these bytes, or it is not sealed against shrinking.
/// Without the seal the peer could shrink the file, and an access beyond its end would kill this process. Other errors:
/// those of SharedMapping::map().
Result<SharedMapping> map_peers_file(OwnedFd fd, std::uint64_t offset, std::uint64_t bytes, bool is_writable);

/// A ring of notifications for one producer process and one consumer process; each calls from one thread at a time. The
/// producer also records here in which slot's memory it copies, so that the consumer, which owns that memory, can wait.
class NoteRing {
 public:
  static constexpr std::uint64_t kCapacity = std::uint64_t{256} << 10;  // bytes; each note takes 4 more for its length
  static constexpr std::uint64_t kPageBytes = kCapacity + 4096;

  explicit NoteRing(SharedMapping pages) : pages_(std::move(pages)) {}

  /// Appends a note. Returns false if the ring has no room for the note now. Otherwise sets `must_wake`: true for the
  /// ring's first note and for the first note after ask_to_be_woken(), else false.
  bool push(std::string_view note, bool& must_wake);
  /// Returns nullopt if the ring is empty or malformed; if malformed, is_broken() is true.
  std::optional<std::string> pop();
  bool has_notes() const { return header().tail.load(std::memory_order_seq_cst) != head_; }
  /// The consumer calls this function, and then checks the ring once more, before it sleeps. The next push() sets
  /// `must_wake` to true.
  void ask_to_be_woken() { header().is_woken.store(0, std::memory_order_seq_cst); }
  bool is_broken() const { return is_broken_; }

  /// The producer calls enter() before each piece that it copies, and exit() after it. It must call enter() before it
  /// calls ControlPage::is_open().
  void enter(std::uint32_t slot) { header().slot_inside.store(slot + 1, std::memory_order_seq_cst); }
  void exit() { header().slot_inside.store(0, std::memory_order_release); }
  /// The consumer calls this function after it has closed the slot. Returns true if the producer may still be copying
  /// in the slot's memory.
  bool is_inside(std::uint32_t slot) const { return header().slot_inside.load(std::memory_order_seq_cst) == slot + 1; }
  bool is_inside() const { return header().slot_inside.load(std::memory_order_seq_cst) != 0; }
  int fd() const { return pages_.fd(); }

 private:
  struct Header {
    alignas(64) std::atomic<std::uint64_t> head;  // bytes consumed since the beginning
    alignas(64) std::atomic<std::uint64_t> tail;  // bytes produced since the beginning
    alignas(64) std::atomic<std::uint32_t> is_woken;
    alignas(64) std::atomic<std::uint32_t> slot_inside;  // slot in which a copy runs, plus 1; 0: no copy runs
  };
  Header& header() const { return *reinterpret_cast<Header*>(pages_.span().data()); }
  void copy_in(std::uint64_t at, const void* from, std::size_t bytes);
  void copy_out(std::uint64_t at, void* to, std::size_t bytes) const;

  SharedMapping pages_;
  std::uint64_t head_ = 0;  // the consumer's private head, which the producer can't change
  std::uint64_t tail_ = 0;  // the producer's private tail
  bool is_broken_ = false;
};

/// A page that each transport creates and all its peers map. is_spinning() says whether the transport polls. Each
/// region and grant has a slot on the page, which is open while peers may touch that memory.
/// A peer calls NoteRing::enter() and then is_open(); the owner calls close() and then NoteRing::is_inside(). All four
/// accesses are seq_cst, so the peer sees that the slot is closed, or the owner sees that the peer is inside, or both.
/// So the owner misses no copy.
class ControlPage {
 public:
  // Number of slots, for grants (TransferTable::kGrantsMax) and regions.
  static constexpr std::uint32_t kSlots = 131072;
  static constexpr std::uint64_t kPageBytes = 4096 + std::uint64_t{kSlots} * 8;

  explicit ControlPage(SharedMapping pages) : pages_(std::move(pages)) {}
  int fd() const { return pages_.fd(); }

  void set_spinning(bool is_spinning) { header().is_spinning.store(is_spinning ? 1 : 0, std::memory_order_seq_cst); }
  bool is_spinning() const { return header().is_spinning.load(std::memory_order_seq_cst) != 0; }

  /// Returns the value that an open slot holds: for a region its id, for a grant a hash of its descriptor. Because of
  /// the hash, a descriptor with any changed field does not match the slot, and peers that read the page can't learn
  /// the ids of grants.
  static std::uint64_t pass(const RegionDescriptor& descriptor);
  static std::uint64_t pass(std::uint32_t region) { return region; }
  /// Opens a slot. Only the owner calls this function and the next two.
  void open(std::uint32_t slot, std::uint64_t pass) { state(slot).store(pass, std::memory_order_release); }
  void close(std::uint32_t slot) { state(slot).store(0, std::memory_order_seq_cst); }
  void close_all() { header().is_closed.store(1, std::memory_order_seq_cst); }
  /// Returns true if the slot is open and holds `pass`, and the owner is not shutting down. Only peers call this
  /// function.
  bool is_open(std::uint32_t slot, std::uint64_t pass) const {
    return state(slot).load(std::memory_order_seq_cst) == pass && !is_closed();
  }
  /// Returns true if the owner is shutting down. Only peers call this function.
  bool is_closed() const { return header().is_closed.load(std::memory_order_seq_cst) != 0; }

 private:
  struct Header {
    std::atomic<std::uint32_t> is_spinning;
    alignas(64) std::atomic<std::uint32_t> is_closed;
  };
  Header& header() const { return *reinterpret_cast<Header*>(pages_.span().data()); }
  std::atomic<std::uint64_t>& state(std::uint32_t slot) const;

  SharedMapping pages_;
};

}  // namespace kvferry::shm
