// memcpy for amounts that no cache holds: its stores go past the caches, so that memory is not read before it is
// overwritten, and the next source's first lines are fetched while one is copied.
#pragma once

#include <cstddef>

namespace kvferry {

/// Ordinary stores where the processor has no streaming ones. finish_streams() before anybody else may read `to`.
/// `ahead`: as many bytes that are needed next; they are fetched line by line meanwhile.
void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes, const std::byte* ahead = nullptr);
void finish_streams();

/// Starts to fetch up to `lines_max` cache lines: the hardware fetches ahead by itself, but within a page only.
void expect(const std::byte* from, std::size_t bytes, std::size_t lines_max = 8);

}  // namespace kvferry
