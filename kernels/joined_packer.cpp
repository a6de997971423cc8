#include "kernels/joined_packer.h"

#include <algorithm>
#include <utility>

namespace kvferry {
namespace {

using Pass = StreamPacker::Pass;
using PassPtr = std::unique_ptr<Pass>;

/// One pass for each layout, all in one stream, so the last one ends last. Only the last one has checksums.
class JoinedPass final : public Pass {
 public:
  void add(PassPtr pass, std::uint32_t num_layers) {
    const std::uint32_t first = num_layers_;
    num_layers_ += num_layers;
    parts_.push_back({std::move(pass), first, num_layers_});
  }

  Result<void> copy_layers(std::uint32_t first, std::uint32_t end) override {
    if (first != next_layer_ || end <= first || end > num_layers_)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("layers [{}, {}) of several layouts can't be copied now: {} of {} layers are copied, "
                               "and the next ones must follow in order",
                               first, end, next_layer_, num_layers_)};
    next_layer_ = end;
    for (const Part& part : parts_) {
      const std::uint32_t from = std::max(first, part.first), to = std::min(end, part.end);
      if (from < to) KVFERRY_TRY(part.pass->copy_layers(from - part.first, to - part.first));
    }
    return {};
  }

  Result<void> finish() override {
    for (const Part& part : parts_) KVFERRY_TRY(part.pass->finish());
    return {};
  }
  Result<bool> is_done() const override { return parts_.back().pass->is_done(); }
  Result<std::vector<std::uint64_t>> wait() override { return parts_.back().pass->wait(); }

 private:
  struct Part {
    PassPtr pass;
    std::uint32_t first = 0, end = 0;  // the layout's layers among all layers
  };
  std::vector<Part> parts_;
  std::uint32_t num_layers_ = 0, next_layer_ = 0;
};

class JoinedPacker final : public StreamPacker {
 public:
  explicit JoinedPacker(std::vector<std::unique_ptr<StreamPacker>> packers) : packers_(std::move(packers)) {
    for (const auto& packer : packers_) {
      num_layers_ += packer->num_layers();
      bytes_per_token_ += packer->chunk_bytes_per_token();
    }
  }
  std::uint32_t num_layers() const override { return num_layers_; }
  std::uint64_t chunk_bytes_per_token() const override { return bytes_per_token_; }

  Result<PassPtr> gather(std::span<const PackerJob> jobs, DeviceStream stream, bool wants_checksums) override {
    return start(jobs, [&](StreamPacker& packer, std::span<const PackerJob> parts, bool is_last) {
      return packer.gather(parts, stream, is_last && wants_checksums);
    });
  }
  Result<PassPtr> scatter(std::span<const PackerJob> jobs, DeviceStream stream, bool wants_checksums) override {
    return start(jobs, [&](StreamPacker& packer, std::span<const PackerJob> parts, bool is_last) {
      return packer.scatter(parts, stream, is_last && wants_checksums);
    });
  }

 private:
  template <class StartPart>
  Result<PassPtr> start(std::span<const PackerJob> jobs, StartPart start_part) {
    std::vector<PackerJob> parts(jobs.begin(), jobs.end());
    for (PackerJob& part : parts) {
      if (part.chunk_bytes / bytes_per_token_ < part.chunk_tokens)
        return Error{
            ErrorCode::kInvalidArgument,
            fmt::format("a chunk buffer of {} bytes is too small for {} tokens of {} bytes each in all layouts",
                        part.chunk_bytes, part.chunk_tokens, bytes_per_token_)};
      if (part.hashed.empty()) part.hashed = {part.chunk, part.chunk_tokens * bytes_per_token_};
    }
    auto joined = std::make_unique<JoinedPass>();
    for (const auto& packer : packers_) {
      for (PackerJob& part : parts) part.chunk_bytes = part.chunk_tokens * packer->chunk_bytes_per_token();
      joined->add(KVFERRY_TRY(start_part(*packer, parts, packer == packers_.back())), packer->num_layers());
      for (PackerJob& part : parts) part.chunk += part.chunk_bytes;
    }
    return PassPtr(std::move(joined));
  }

  std::vector<std::unique_ptr<StreamPacker>> packers_;  // [layout]
  std::uint32_t num_layers_ = 0;
  std::uint64_t bytes_per_token_ = 0;
};

}  // namespace

Result<std::unique_ptr<StreamPacker>> make_joined_packer(const Gpu& gpu, std::span<const KvLayout> layouts,
                                                         std::span<const ChunkFormat> formats) {
  if (layouts.empty() || (!formats.empty() && formats.size() != layouts.size()))
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("a packer was given {} KV layouts and {} formats of chunks; it needs at least one layout, "
                             "and either no format or one for each layout",
                             layouts.size(), formats.size())};
  std::vector<std::unique_ptr<StreamPacker>> packers;
  for (std::size_t i = 0; i < layouts.size(); ++i)
    packers.push_back(KVFERRY_TRY(gpu.make_packer(layouts[i], formats.empty() ? ChunkFormat{} : formats[i])));
  if (packers.size() == 1) return std::move(packers.front());
  return std::unique_ptr<StreamPacker>(std::make_unique<JoinedPacker>(std::move(packers)));
}

}  // namespace kvferry
