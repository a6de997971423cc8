// A TestCache whose memory is in a GPU.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "tests/kernels/test_cache.h"

namespace kvferry {

/// Returns the reason why there is no GPU for tests; empty if there is one.
std::string why_no_gpu();

/// A piece of GPU memory.
class DeviceBytes {
 public:
  explicit DeviceBytes(std::size_t size);
  explicit DeviceBytes(std::span<const std::byte> bytes);
  ~DeviceBytes();
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  void set(std::span<const std::byte> bytes);
  std::vector<std::byte> get() const;

 private:
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

class DeviceCache {
 public:
  explicit DeviceCache(const CacheShape& shape);
  const KvLayout& layout() const { return layout_; }
  std::vector<std::byte> memory() const { return bytes_.get(); }
  void set_memory(std::span<const std::byte> bytes) { bytes_.set(bytes); }

 private:
  DeviceBytes bytes_;
  KvLayout layout_;
};

}  // namespace kvferry
