// Memory straight from the system, for tables that are large and grow.
#pragma once

#include <cstddef>
#include <utility>

namespace kvferry::controller {

/// Zeroed pages, huge ones where they fit, are wanted and the system gives them to who asks (madvise). Touched pages
/// alone cost.
class PageMemory {
 public:
  enum class Pages { kSmall, kHuge };

  PageMemory() = default;
  /// Throws std::bad_alloc.
  explicit PageMemory(std::size_t size_bytes, Pages pages = Pages::kHuge);
  PageMemory(PageMemory&& other) noexcept { swap(other); }
  PageMemory& operator=(PageMemory&& other) noexcept {
    PageMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~PageMemory();

  void* data() const { return data_; }
  /// Gives pages of [0, end_bytes) back, in pieces of a huge page; what lay there is lost. `end_bytes` only grows.
  void release_before(std::size_t end_bytes);

 private:
  void swap(PageMemory& other) noexcept;

  char* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t released_bytes_ = 0;
};

}  // namespace kvferry::controller
