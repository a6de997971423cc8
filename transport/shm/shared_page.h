// Memory that two processes of one host share to spare each other system calls: the ring of notifications and the
// control page. What the other side wrote is never trusted further than it can harm. Private to this folder.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "transport/base/owned_fd.h"
#include "transport/base/result.h"

namespace kvferry::shm {

/// An anonymous shared file that can't shrink any more, and its mapping.
class SharedPages {
 public:
  static Result<SharedPages> create(std::uint64_t bytes);
  /// Maps what a peer sent. kRefused: it is smaller than `bytes_min`, or not sealed against shrinking although it
  /// should be.
  static Result<SharedPages> map(OwnedFd fd, std::uint64_t offset, std::uint64_t bytes, bool is_sealed);
  SharedPages(SharedPages&& other) noexcept;
  SharedPages& operator=(SharedPages&& other) noexcept;
  ~SharedPages();

  std::span<std::byte> span() const { return {data_, bytes_}; }
  int fd() const { return fd_.get(); }

 private:
  SharedPages() = default;
  OwnedFd fd_;
  std::byte* data_ = nullptr;
  std::uint64_t bytes_ = 0;
  std::uint64_t mapped_bytes_ = 0;  // whole pages
};

/// One producer process, one consumer process; each side calls from one thread at a time. The producer also says here
/// where it copies, for the consumer is who owns that memory.
class NoteRing {
 public:
  static constexpr std::uint64_t kCapacity = std::uint64_t{256} << 10;  // bytes of notes with 4 of length each
  static constexpr std::uint64_t kPageBytes = kCapacity + 4096;

  explicit NoteRing(SharedPages pages);

  /// False: no room now. Sets `must_wake` when the consumer has not been told since it last emptied the ring.
  bool push(std::string_view note, bool& must_wake);
  /// None: empty, or is_broken(): the producer wrote nonsense.
  std::optional<std::string> pop();
  bool has_notes() const { return header().tail.load(std::memory_order_acquire) != head_; }
  /// Consumer, before it looks for the last time: from here on the producer wakes it.
  void ask_to_be_woken() { header().is_woken.store(0, std::memory_order_seq_cst); }
  bool is_broken() const { return is_broken_; }

  /// Producer, around each piece that it copies: says so before it looks whether the slot is open.
  void enter(std::uint32_t slot) { header().slot_inside.store(slot + 1, std::memory_order_seq_cst); }
  void leave() { header().slot_inside.store(0, std::memory_order_release); }
  /// Consumer, after it has closed the slot: the producer may still be copying.
  bool is_inside(std::uint32_t slot) const { return header().slot_inside.load(std::memory_order_seq_cst) == slot + 1; }
  bool is_inside() const { return header().slot_inside.load(std::memory_order_seq_cst) != 0; }
  int fd() const { return pages_.fd(); }

 private:
  struct Header {
    alignas(64) std::atomic<std::uint64_t> head;  // bytes consumed since the beginning
    alignas(64) std::atomic<std::uint64_t> tail;  // bytes produced since the beginning
    alignas(64) std::atomic<std::uint32_t> is_woken;
    alignas(64) std::atomic<std::uint32_t> slot_inside;  // + 1; 0: the producer copies nothing
  };
  Header& header() const { return *reinterpret_cast<Header*>(pages_.span().data()); }
  void copy_in(std::uint64_t at, const void* from, std::size_t bytes);
  void copy_out(std::uint64_t at, void* to, std::size_t bytes) const;

  SharedPages pages_;
  std::uint64_t head_ = 0;  // the consumer's own, which the producer can't disturb
  std::uint64_t tail_ = 0;  // the producer's own
  bool is_broken_ = false;
};

/// One a transport, made by it and mapped by all its peers: does it poll, and which memory may they still touch. A peer
/// that enters (NoteRing) and then finds a slot open is seen by the owner that closes the slot and then looks who is
/// inside: one of the two stores comes first.
class ControlPage {
 public:
  static constexpr std::uint32_t kSlots = 131072;  // grants, by TransferTable::kGrantsMax, and regions
  static constexpr std::uint64_t kPageBytes = 4096 + std::uint64_t{kSlots} * 8;

  explicit ControlPage(SharedPages pages) : pages_(std::move(pages)) {}
  int fd() const { return pages_.fd(); }

  void set_spinning(bool is_spinning) { header().is_spinning.store(is_spinning ? 1 : 0, std::memory_order_seq_cst); }
  bool is_spinning() const { return header().is_spinning.load(std::memory_order_seq_cst) != 0; }

  /// What is kept in an open slot: no two ever have the same. `grant` is 0 for the whole region.
  static std::uint64_t pass(std::uint32_t region, std::uint32_t grant) { return std::uint64_t{region} << 32 | grant; }
  /// Owner.
  void open(std::uint32_t slot, std::uint64_t pass) { state(slot).store(pass, std::memory_order_release); }
  void close(std::uint32_t slot) { state(slot).store(0, std::memory_order_seq_cst); }
  void close_all() { header().is_closed.store(1, std::memory_order_seq_cst); }
  /// Peer: the owner has not closed it yet.
  bool is_open(std::uint32_t slot, std::uint64_t pass) const {
    return state(slot).load(std::memory_order_seq_cst) == pass && !is_closed();
  }
  /// Peer: the owner shuts down.
  bool is_closed() const { return header().is_closed.load(std::memory_order_seq_cst) != 0; }

 private:
  struct Header {
    std::atomic<std::uint32_t> is_spinning;
    alignas(64) std::atomic<std::uint32_t> is_closed;
  };
  Header& header() const { return *reinterpret_cast<Header*>(pages_.span().data()); }
  std::atomic<std::uint64_t>& state(std::uint32_t slot) const;

  SharedPages pages_;
};

}  // namespace kvferry::shm
