// memcpy for amounts larger than a cache: its stores bypass the caches, so that memory is not read before it is
// overwritten, and the start of the next source is prefetched during the copy.
#pragma once

#include <cstddef>

namespace kvferry {

/// Copies `bytes` bytes; uses ordinary stores if the processor has no streaming stores. Call finish_streams() before
/// another thread reads `to`. `ahead` is the source of the next copy, which is prefetched meanwhile.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* ahead = nullptr);
void finish_streams();

/// Prefetches up to `lines_max` cache lines, because the hardware's own prefetch stops at the end of a page.
void expect(const std::byte* from, std::size_t bytes, std::size_t lines_max = 8);

}  // namespace kvferry
