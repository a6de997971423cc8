#include <map>
#include <mutex>
#include <utility>

#include "connector/runtime/store/chunk_store.h"
#include "kernels/packer.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

class HostStore final : public ChunkStore {
 public:
  HostStore(ChunkStoreParts parts, std::vector<std::unique_ptr<Packer>> packers)
      : parts_(std::move(parts)), packers_(std::move(packers)), bytes_per_token_(bytes_per_token(parts_.layouts)) {}

  std::string describe() const override { return {}; }
  void save(const std::vector<SaveJob>& jobs, DeviceStream stream) override;
  Result<std::uint64_t> save_layer(const SaveJob& job, const SaveItem& item, std::uint32_t layer) override;
  std::vector<SaveDone> take_saved() override {
    const std::lock_guard lock(mutex_);
    return std::exchange(saved_, {});
  }
  void load(std::vector<LoadJob> jobs, const IsReadable& is_readable, DeviceStream stream) override;
  std::vector<Loaded> take_loaded() override {
    const std::lock_guard lock(mutex_);
    return std::exchange(loaded_, {});
  }
  Result<Place> land(ChunkRef chunk, std::uint64_t) override {
    return Place{parts_.pool_region, chunk.slot * parts_.chunk_bytes};
  }
  void landed(std::span<const Landed> chunks) override {
    const std::lock_guard lock(mutex_);
    landed_.insert(landed_.end(), chunks.begin(), chunks.end());
  }
  std::vector<Landed> take_landed() override {
    const std::lock_guard lock(mutex_);
    return std::exchange(landed_, {});
  }
  std::size_t num_fenced() const override { return 0; }

 private:
  std::span<std::byte> slot_bytes(ChunkRef chunk, std::uint64_t tokens) {
    return parts_.pool.subspan(chunk.slot * parts_.chunk_bytes, tokens * bytes_per_token_);
  }
  Result<std::uint64_t> pack(const SaveJob& job, const SaveItem& item);
  LoadOutcome unpack(const LoadJob& job, const IsReadable& is_readable);
  Result<std::uint64_t> unpack(const LoadJob& job, const LoadItem& item);

  ChunkStoreParts parts_;
  std::vector<std::unique_ptr<Packer>> packers_;  // [layout]
  std::uint64_t bytes_per_token_;
  std::vector<std::unique_ptr<Packer>> layers_;  // [layer] packer of this layer alone; made at the first save_layer()
  struct Layered {
    ChecksumStream checksum;
    std::uint32_t num_layers = 0;
    std::uint64_t num_bytes = 0;
  };
  std::map<ChunkRef, Layered> layered_;  // saves of which some layers are packed already
  std::mutex mutex_;
  std::vector<SaveDone> saved_;
  std::vector<Loaded> loaded_;
  std::vector<Landed> landed_;
};

void HostStore::save(const std::vector<SaveJob>& jobs, DeviceStream) {
  for (const SaveJob& job : jobs) {
    for (const SaveItem& item : job.items) {
      const Result<std::uint64_t> checksum = pack(job, item);
      if (!checksum)
        log().error("saving {} tokens of request {} failed: {}", item.num_tokens, job.request_id,
                    checksum.error().what);
      const std::lock_guard lock(mutex_);
      saved_.push_back({item.chunk, static_cast<bool>(checksum), checksum ? *checksum : 0});
    }
  }
}

Result<std::uint64_t> HostStore::pack(const SaveJob& job, const SaveItem& item) {
  if (auto layered = layered_.extract(item.chunk); layered && layered.mapped().num_layers == layers_.size())
    return layered.mapped().checksum.digest();
  const TokenRun run{item.first_token, item.num_tokens, job.block_ids};
  const std::span<std::byte> chunk = slot_bytes(item.chunk, item.num_tokens);
  if (packers_.size() == 1) return packers_[0]->gather(run, chunk);
  std::uint64_t done = 0;
  for (const std::unique_ptr<Packer>& packer : packers_) {
    const std::uint64_t bytes = item.num_tokens * packer->chunk_bytes_per_token();
    KVFERRY_TRY(packer->gather(run, chunk.subspan(done, bytes)));
    done += bytes;
  }
  return chunk_checksum(chunk);
}

Result<std::uint64_t> HostStore::save_layer(const SaveJob& job, const SaveItem& item, std::uint32_t layer) {
  if (layers_.empty()) {
    std::vector<std::unique_ptr<Packer>> packers;
    for (const KvLayout& layout : parts_.layouts) {
      for (const LayerLayout& own : layout.layers) {
        KvLayout one = layout;
        one.layers = {own};
        packers.push_back(KVFERRY_TRY(make_host_packer(std::move(one))));
      }
    }
    layers_ = std::move(packers);
  }
  Layered& layered = layered_[item.chunk];
  if (layer != layered.num_layers || layer >= layers_.size())
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("layer {} of a save came after {} layers; layers must come in order", layer, layered.num_layers)};
  const std::uint64_t bytes = item.num_tokens * layers_[layer]->chunk_bytes_per_token();
  const std::span<std::byte> run = slot_bytes(item.chunk, item.num_tokens).subspan(layered.num_bytes, bytes);
  std::uint64_t checksum = KVFERRY_TRY(layers_[layer]->gather({item.first_token, item.num_tokens, job.block_ids}, run));
  layered.checksum.update(run);
  layered.num_layers += 1;
  layered.num_bytes += bytes;
  return checksum;
}

void HostStore::load(std::vector<LoadJob> jobs, const IsReadable& is_readable, DeviceStream) {
  for (LoadJob& job : jobs) {
    LoadOutcome outcome = unpack(job, is_readable);
    const std::lock_guard lock(mutex_);
    loaded_.push_back({std::move(job), std::move(outcome)});
  }
}

LoadOutcome HostStore::unpack(const LoadJob& job, const IsReadable& is_readable) {
  LoadOutcome outcome;
  for (const LoadItem& item : job.items) {
    if (!is_readable(item.chunk) || parts_.rank >= item.checksums.size()) {
      outcome.corrupt.push_back(item.chunk);
      return outcome;
    }
    const Result<std::uint64_t> checksum = unpack(job, item);
    if (!checksum) {
      log().error("loading {} tokens of request {} failed: {}", item.num_tokens, job.request_id, checksum.error().what);
      return outcome;
    }
    if (*checksum != item.checksums[parts_.rank]) {
      outcome.corrupt.push_back(item.chunk);
      return outcome;
    }
    outcome.tokens_loaded += item.num_tokens;
  }
  return outcome;
}

/// Scatters a chunk's tokens into blocks, and returns the chunk's checksum.
Result<std::uint64_t> HostStore::unpack(const LoadJob& job, const LoadItem& item) {
  const std::span<const std::byte> chunk = slot_bytes(item.chunk, item.chunk_tokens);
  const TokenRun run{item.first_token, item.num_tokens, job.block_ids};
  if (packers_.size() == 1) return packers_[0]->scatter_and_hash(chunk, item.chunk_tokens, item.skip_tokens, run);
  std::uint64_t done = 0;
  for (const std::unique_ptr<Packer>& packer : packers_) {
    const std::uint64_t bytes = item.chunk_tokens * packer->chunk_bytes_per_token();
    KVFERRY_TRY(packer->scatter(chunk.subspan(done, bytes), item.chunk_tokens, item.skip_tokens, run));
    done += bytes;
  }
  return chunk_checksum(chunk);
}

}  // namespace

Result<std::unique_ptr<ChunkStore>> make_host_store(ChunkStoreParts parts) {
  std::vector<std::unique_ptr<Packer>> packers;
  for (const KvLayout& layout : parts.layouts) packers.push_back(KVFERRY_TRY(make_host_packer(layout)));
  return std::unique_ptr<ChunkStore>(std::make_unique<HostStore>(std::move(parts), std::move(packers)));
}

}  // namespace kvferry
