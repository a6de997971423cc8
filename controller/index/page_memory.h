// Memory mapped directly from the kernel, for large tables.
#pragma once

#include <cstddef>
#include <utility>

namespace kvferry::controller {

/// Zeroed pages. A page occupies memory only after it was touched. With Pages::kHuge and a size of at least one huge
/// page, the memory begins at a huge page's boundary, and the kernel uses huge pages where it can.
class PageMemory {
 public:
  enum class Pages { kSmall, kHuge };

  PageMemory() = default;
  /// Maps the memory. Throws std::bad_alloc if the kernel refuses.
  explicit PageMemory(std::size_t size_bytes, Pages pages = Pages::kHuge);
  PageMemory(PageMemory&& other) noexcept { swap(other); }
  PageMemory& operator=(PageMemory&& other) noexcept {
    PageMemory(std::move(other)).swap(*this);
    return *this;
  }
  ~PageMemory();

  void* data() const { return data_; }
  /// Frees the whole huge pages within [0, end_bytes); their contents are lost. `end_bytes` must not decrease.
  void release_before(std::size_t end_bytes);

 private:
  void swap(PageMemory& other) noexcept;

  char* data_ = nullptr;
  std::size_t size_bytes_ = 0;
  std::size_t released_bytes_ = 0;
};

}  // namespace kvferry::controller
