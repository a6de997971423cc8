#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "connector/runtime/store/chunk_store.h"
#include "kernels/packer.h"
#include "transport/base/log.h"

namespace kvferry {
namespace {

// Marks the end of a layer that has not arrived. A layer that happens to end with these bytes is unpacked later.
constexpr std::uint64_t kNotArrived = 0x9d4f'6b13'e2a8'57c1;
// A step unpacks no further layer ahead once it has unpacked this many bytes ahead. Unpacking them takes a core about
// 4 ms, by which the step becomes longer.
constexpr std::uint64_t kAheadBytes = std::uint64_t{16} << 20;

class HostStore final : public ChunkStore {
 public:
  HostStore(ChunkStoreParts parts, std::vector<std::unique_ptr<Packer>> packers)
      : parts_(std::move(parts)), packers_(std::move(packers)) {
    for (const std::unique_ptr<Packer>& packer : packers_) {
      const std::uint64_t bytes = packer->chunk_bytes_per_token(), num_layers = packer->layout().layers.size();
      bytes_per_token_ += bytes;
      layer_bytes_.insert(layer_bytes_.end(), num_layers, bytes / num_layers);
    }
  }

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
  void begin_ahead(const LoadJob& job) override;
  void unpack_ahead(const IsReadable& is_readable, const IsReadable& is_arriving) override;
  void drop_ahead(const LoadJob& job) override { ahead_.erase({job.request_id, job.attempt}); }
  Result<Place> land(ChunkRef chunk, std::uint64_t bytes) override {
    mark_layers(chunk, bytes);
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
  struct Layered {
    ChecksumStream checksum;
    std::uint32_t num_layers = 0;
    std::uint64_t num_bytes = 0;
  };
  struct Ahead {
    LoadJob job;
    std::vector<Layered> items;
  };
  Result<void> make_layers();
  void mark_layers(ChunkRef chunk, std::uint64_t bytes);
  bool has_arrived(const LoadItem& item, const Layered& layered);
  Result<void> unpack_layer(const LoadJob& job, const LoadItem& item, Layered& layered);
  bool completes(Ahead& ahead, std::size_t index, std::uint64_t checksum);
  LoadOutcome unpack(const LoadJob& job, const IsReadable& is_readable);
  Result<std::uint64_t> unpack(const LoadJob& job, const LoadItem& item);

  ChunkStoreParts parts_;
  std::vector<std::unique_ptr<Packer>> packers_;  // [layout]
  std::uint64_t bytes_per_token_ = 0;             // bytes of a token in a chunk
  std::vector<std::uint64_t> layer_bytes_;        // [layer] bytes of a token in this layer of a chunk
  std::vector<std::unique_ptr<Packer>> layers_;   // [layer] packer of this layer alone; empty until one is needed
  std::map<ChunkRef, Layered> layered_;           // saves of which some layers are packed already
  std::map<std::pair<std::string, std::uint32_t>, Ahead> ahead_;  // [request, attempt] jobs of begin_ahead()
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
        log().error("saving {} tokens of request {} failed, so their KV is not kept: {}", item.num_tokens,
                    job.request_id, checksum.error().what);
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
  ChecksumStream checksum;
  std::uint64_t done = 0;
  for (const std::unique_ptr<Packer>& packer : packers_) {
    const std::uint64_t bytes = item.num_tokens * packer->chunk_bytes_per_token();
    KVFERRY_TRY(packer->gather_part(run, chunk.subspan(done, bytes), checksum));
    done += bytes;
  }
  return checksum.digest();
}

Result<void> HostStore::make_layers() {
  if (!layers_.empty()) return {};
  std::vector<std::unique_ptr<Packer>> packers;
  for (std::size_t i = 0; i < parts_.layouts.size(); ++i) {
    for (const LayerLayout& own : parts_.layouts[i].layers) {
      KvLayout one = parts_.layouts[i];
      one.layers = {own};
      packers.push_back(KVFERRY_TRY(make_host_packer(std::move(one), parts_.format_of(i))));
    }
  }
  layers_ = std::move(packers);
  return {};
}

Result<std::uint64_t> HostStore::save_layer(const SaveJob& job, const SaveItem& item, std::uint32_t layer) {
  KVFERRY_TRY(make_layers());
  Layered& layered = layered_[item.chunk];
  if (layer != layered.num_layers || layer >= layers_.size())
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("layer {} of a save came when layer {} of {} was due; layers must come in order, from 0",
                             layer, layered.num_layers, layers_.size())};
  const std::uint64_t bytes = item.num_tokens * layers_[layer]->chunk_bytes_per_token();
  const std::span<std::byte> run = slot_bytes(item.chunk, item.num_tokens).subspan(layered.num_bytes, bytes);
  const std::uint64_t checksum = KVFERRY_TRY(
      layers_[layer]->gather_part({item.first_token, item.num_tokens, job.block_ids}, run, layered.checksum));
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

/// Marks the ends of the chunk's layers, before a peer writes the chunk.
void HostStore::mark_layers(ChunkRef chunk, std::uint64_t bytes) {
  const std::uint64_t num_tokens = bytes / bytes_per_token_;
  std::byte* end = slot_bytes(chunk, num_tokens).data();
  for (const std::uint64_t layer : layer_bytes_) {
    end += num_tokens * layer;
    if (num_tokens * layer >= sizeof(kNotArrived))
      std::memcpy(end - sizeof(kNotArrived), &kNotArrived, sizeof(kNotArrived));
  }
}

void HostStore::begin_ahead(const LoadJob& job) {
  if (const auto made = make_layers(); !made) return;
  Ahead& ahead = ahead_[{job.request_id, job.attempt}];
  ahead.items.resize(job.items.size());
  ahead.job = job;
}

/// Returns true if the next layer seems to have arrived: layers arrive in order, and the last bytes of the layer after
/// it are there.
bool HostStore::has_arrived(const LoadItem& item, const Layered& layered) {
  const std::uint32_t next = layered.num_layers + 1;
  if (next >= layer_bytes_.size()) return false;
  const std::uint64_t end = layered.num_bytes + item.chunk_tokens * (layer_bytes_[next - 1] + layer_bytes_[next]);
  const std::byte* const mark = slot_bytes(item.chunk, item.chunk_tokens).data() + end - sizeof(kNotArrived);
  std::uint64_t found = 0;
  std::memcpy(&found, mark, sizeof(found));
  return found != kNotArrived;
}

/// Unpacks the chunk's next layer, which a peer may still be writing. The bytes are hashed before they are copied: if
/// the checksum is right, all bytes had arrived before the copy.
Result<void> HostStore::unpack_layer(const LoadJob& job, const LoadItem& item, Layered& layered) {
  const std::uint64_t bytes = item.chunk_tokens * layer_bytes_[layered.num_layers];
  const std::span<const std::byte> run = slot_bytes(item.chunk, item.chunk_tokens).subspan(layered.num_bytes, bytes);
  layered.checksum.update(run);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  KVFERRY_TRY(layers_[layered.num_layers]->scatter(run, item.chunk_tokens, item.skip_tokens,
                                                   {item.first_token, item.num_tokens, job.block_ids}));
  layered.num_layers += 1;
  layered.num_bytes += bytes;
  return {};
}

void HostStore::unpack_ahead(const IsReadable& is_readable, const IsReadable& is_arriving) {
  std::uint64_t unpacked = 0;
  for (auto& [key, ahead] : ahead_) {
    for (std::size_t i = 0; i < ahead.items.size(); ++i) {
      const LoadItem& item = ahead.job.items[i];
      Layered& layered = ahead.items[i];
      const bool is_whole = is_readable(item.chunk);
      if (!is_whole && !is_arriving(item.chunk)) continue;
      while (layered.num_layers < layers_.size() && (is_whole || has_arrived(item, layered))) {
        if (unpacked >= kAheadBytes) return;
        unpacked += item.chunk_tokens * layer_bytes_[layered.num_layers];
        if (!unpack_layer(ahead.job, item, layered)) break;  // load() fails too, and says why
      }
    }
  }
}

/// Unpacks the rest of a chunk that unpack_ahead() has begun. Returns false if unpack_ahead() has not begun it, if
/// unpacking fails, or if the bytes do not have the checksum: the whole chunk must be unpacked then.
bool HostStore::completes(Ahead& ahead, std::size_t index, std::uint64_t checksum) {
  Layered& layered = ahead.items[index];
  while (layered.num_layers > 0 && layered.num_layers < layers_.size())
    if (!unpack_layer(ahead.job, ahead.job.items[index], layered)) return false;
  return layered.num_layers > 0 && layered.checksum.digest() == checksum;
}

LoadOutcome HostStore::unpack(const LoadJob& job, const IsReadable& is_readable) {
  LoadOutcome outcome;
  auto ahead = ahead_.extract({job.request_id, job.attempt});
  for (std::size_t i = 0; i < job.items.size(); ++i) {
    const LoadItem& item = job.items[i];
    if (!is_readable(item.chunk) || parts_.rank >= item.checksums.size()) {
      outcome.corrupt.push_back(item.chunk);
      return outcome;
    }
    if (ahead && completes(ahead.mapped(), i, item.checksums[parts_.rank])) {
      outcome.tokens_loaded += item.num_tokens;
      continue;
    }
    const Result<std::uint64_t> checksum = unpack(job, item);
    if (!checksum) {
      log().error("loading {} tokens of request {} failed, so they are computed again: {}", item.num_tokens,
                  job.request_id, checksum.error().what);
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
  for (std::size_t i = 0; i < parts.layouts.size(); ++i)
    packers.push_back(KVFERRY_TRY(make_host_packer(parts.layouts[i], parts.format_of(i))));
  return std::unique_ptr<ChunkStore>(std::make_unique<HostStore>(std::move(parts), std::move(packers)));
}

}  // namespace kvferry
