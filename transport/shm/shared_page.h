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
};

/// One producer process, one consumer process; each side calls from one thread at a time.
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
  int fd() const { return pages_.fd(); }

 private:
  struct Header {
    alignas(64) std::atomic<std::uint64_t> head;  // bytes consumed since the beginning
    alignas(64) std::atomic<std::uint64_t> tail;  // bytes produced since the beginning
    alignas(64) std::atomic<std::uint32_t> is_woken;
  };
  Header& header() const { return *reinterpret_cast<Header*>(pages_.span().data()); }
  void copy_in(std::uint64_t at, const void* from, std::size_t bytes);
  void copy_out(std::uint64_t at, void* to, std::size_t bytes) const;

  SharedPages pages_;
  std::uint64_t head_ = 0;  // the consumer's own, which the producer can't disturb
  std::uint64_t tail_ = 0;  // the producer's own
  bool is_broken_ = false;
};

/// One a transport, made by it and mapped by all its peers: does it poll, and who is copying by which grant.
class ControlPage {
 public:
  static constexpr std::uint32_t kSlots = 131072;  // grants, by Ledger::kGrantsMax, and regions
  static constexpr std::uint64_t kPageBytes = 4096 + std::uint64_t{kSlots} * 8;

  explicit ControlPage(SharedPages pages) : pages_(std::move(pages)) {}
  int fd() const { return pages_.fd(); }

  void set_spinning(bool is_spinning);
  bool is_spinning() const { return spinning().load(std::memory_order_seq_cst) != 0; }

  enum class Entry { kEntered, kBusy, kRevoked };
  /// Owner: opens the slot for a grant, or a region, of this number.
  void open(std::uint32_t slot, std::uint32_t number);
  /// Peer: nobody has taken it back yet.
  bool is_open(std::uint32_t slot, std::uint32_t number) const;
  /// Peer, around each piece that it copies. `link`: its number at the owner.
  Entry enter(std::uint32_t slot, std::uint32_t grant, std::uint32_t link);
  void leave(std::uint32_t slot);
  /// Owner: from here on nobody enters; the link that is inside, 0 for none.
  std::uint32_t revoke(std::uint32_t slot);

 private:
  // number << 32 | revoked << 31 | link inside
  std::atomic<std::uint64_t>& state(std::uint32_t slot) const;
  std::atomic<std::uint32_t>& spinning() const;

  SharedPages pages_;
};

}  // namespace kvferry::shm
