#include "transport/shm/shared_page.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "transport/base/chunk_key.h"

namespace kvferry::shm {
namespace {

constexpr std::uint64_t kDataOffset = 4096;

}  // namespace

Result<SharedMapping> map_peers_file(OwnedFd fd, std::uint64_t offset, std::uint64_t bytes, bool is_writable) {
  struct stat stats {};
  if (::fstat(fd.get(), &stats) != 0 || bytes == 0 || offset > static_cast<std::uint64_t>(stats.st_size) ||
      bytes > static_cast<std::uint64_t>(stats.st_size) - offset)
    return Error{ErrorCode::kRefused,
                 fmt::format("the peer offers {} bytes at offset {} of its shared memory, whose file has {} bytes",
                             bytes, offset, stats.st_size)};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);  // negative for files that can't be sealed
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0)
    return Error{ErrorCode::kRefused,
                 "the peer's shared memory is not mapped, because it is not sealed against shrinking (F_SEAL_SHRINK)"};
  return SharedMapping::map(std::move(fd), offset, bytes, is_writable);
}

void NoteRing::copy_in(std::uint64_t at, const void* from, std::size_t bytes) {
  std::byte* data = pages_.span().data() + kDataOffset;
  const std::size_t begin = at % kCapacity;
  const std::size_t first = std::min<std::size_t>(bytes, kCapacity - begin);
  std::memcpy(data + begin, from, first);
  std::memcpy(data, static_cast<const std::byte*>(from) + first, bytes - first);
}

void NoteRing::copy_out(std::uint64_t at, void* to, std::size_t bytes) const {
  const std::byte* data = pages_.span().data() + kDataOffset;
  const std::size_t begin = at % kCapacity;
  const std::size_t first = std::min<std::size_t>(bytes, kCapacity - begin);
  std::memcpy(to, data + begin, first);
  std::memcpy(static_cast<std::byte*>(to) + first, data, bytes - first);
}

bool NoteRing::push(std::string_view note, bool& must_wake) {
  const std::uint64_t head = header().head.load(std::memory_order_acquire);
  const auto length = static_cast<std::uint32_t>(note.size());
  if (tail_ - head > kCapacity || sizeof(length) + note.size() > kCapacity - (tail_ - head)) return false;
  copy_in(tail_, &length, sizeof(length));
  copy_in(tail_ + sizeof(length), note.data(), note.size());
  tail_ += sizeof(length) + note.size();
  header().tail.store(tail_, std::memory_order_seq_cst);
  must_wake = header().is_woken.exchange(1, std::memory_order_seq_cst) == 0;
  return true;
}

std::optional<std::string> NoteRing::pop() {
  const std::uint64_t tail = header().tail.load(std::memory_order_acquire);
  if (tail == head_ || is_broken_) return std::nullopt;
  std::uint32_t length = 0;
  const std::uint64_t waiting = tail - head_;
  if (waiting <= kCapacity && waiting >= sizeof(length)) copy_out(head_, &length, sizeof(length));
  if (waiting > kCapacity || waiting < sizeof(length) || length > waiting - sizeof(length)) {
    is_broken_ = true;
    return std::nullopt;
  }
  std::string note(length, '\0');
  copy_out(head_ + sizeof(length), note.data(), length);
  head_ += sizeof(length) + length;
  header().head.store(head_, std::memory_order_release);
  return note;
}

std::uint64_t ControlPage::pass(const RegionDescriptor& descriptor) {
  if (descriptor.grant == 0) return pass(descriptor.region);
  return root_key("pass of a grant", encode(descriptor)).first_word();
}

std::atomic<std::uint64_t>& ControlPage::state(std::uint32_t slot) const {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(pages_.span().data() + kDataOffset)[slot % kSlots];
}

}  // namespace kvferry::shm
