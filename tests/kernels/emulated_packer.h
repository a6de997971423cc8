// A packer that copies with the device code, which this processor runs one lane after the other.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "kernels/device/segment_hash.h"
#include "kernels/device_plan.h"
#include "kernels/packer.h"

namespace kvferry {

class EmulatedPacker {
 public:
  /// layers_at_once: number of layers in a launch. With several launches it acts like a connector that sends layer by
  /// layer.
  static Result<EmulatedPacker> make(const KvLayout& layout, const ChunkFormat& format, std::uint32_t layers_at_once);

  bool is_vectorised() const { return device::is_vectorisable(host_plan_); }
  std::uint64_t chunk_bytes_per_token() const { return shape_.bytes_per_token; }
  /// These do the same as the functions of Packer.
  Result<std::uint64_t> gather(const TokenRun& run, std::span<std::byte> chunk) const;
  Result<void> scatter(std::span<const std::byte> chunk, std::uint32_t chunk_tokens, std::uint32_t skip_tokens,
                       const TokenRun& run) const;

 private:
  EmulatedPacker(KvLayout layout, ChunkFormat format, const ChunkShape& shape, std::uint32_t layers_at_once)
      : layout_(std::move(layout)),
        format_(std::move(format)),
        shape_(shape),
        layers_at_once_(layers_at_once),
        host_plan_(device::make_plan(layout_, format_, shape_)) {}
  template <class Call>
  void for_each_launch(Call call) const;

  KvLayout layout_;
  ChunkFormat format_;
  ChunkShape shape_;
  std::uint32_t layers_at_once_;
  device::HostPlan host_plan_;
  device::SegmentSecret secret_ = device::segment_secret();
};

}  // namespace kvferry
