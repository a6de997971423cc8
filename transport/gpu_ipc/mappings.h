// A peer's regions as they are mapped in this process. Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "transport/base/device.h"

namespace kvferry::gpu_ipc {

/// Opens each region of a peer once, which takes milliseconds. Closed with the last transfer that uses one of them.
class Mappings {
 public:
  explicit Mappings(Device& device) : device_(device) {}
  ~Mappings() {
    for (const auto& [region, base] : opened_) device_.close_memory(base);
  }
  Mappings(const Mappings&) = delete;
  Mappings& operator=(const Mappings&) = delete;

  /// Returns where the region is mapped. `bytes`: its size by the peer's descriptor.
  Result<std::byte*> open(const std::string& handle, std::uint64_t bytes) {
    const std::pair key(handle, bytes);
    if (const auto found = opened_.find(key); found != opened_.end()) return found->second;
    Result<std::byte*> base = device_.open_memory(handle, bytes);
    if (base) opened_.emplace(key, *base);
    return base;
  }

 private:
  Device& device_;
  std::map<std::pair<std::string, std::uint64_t>, std::byte*> opened_;  // key: exported handle and size
};

}  // namespace kvferry::gpu_ipc
