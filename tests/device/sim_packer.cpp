#include "tests/device/sim_packer.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "kernels/chunk_shape.h"
#include "transport/base/check.h"

namespace kvferry {
namespace {

std::atomic<std::uint64_t> ended_early{0}, hashed{0};

/// State that a pass shares with its work in the streams, because the pass may end before the work.
struct Shared {
  std::unique_ptr<Packer> packer;
};

struct OwnedJob {
  explicit OwnedJob(const PackerJob& from)
      : job(from), block_ids(from.run.block_ids.begin(), from.run.block_ids.end()) {}
  TokenRun run() const { return {job.run.first_token, job.run.num_tokens, block_ids}; }
  PackerJob job;
  std::vector<std::vector<BlockId>> block_ids;
};

class SimPass final : public StreamPacker::Pass {
 public:
  SimPass(SimDevice& device, std::shared_ptr<Shared> shared, DeviceStream stream, bool gathers, bool wants_checksums)
      : device_(device),
        shared_(std::move(shared)),
        stream_(stream),
        gathers_(gathers),
        wants_checksums_(wants_checksums) {}
  ~SimPass() override {
    if (!*is_over_) ended_early += 1;
  }

  Result<void> start(std::span<const PackerJob> jobs) {
    Result<DeviceEvent> begun = DeviceEvent::record(device_, stream_);
    if (!begun) return std::move(begun).error();
    begun_ = std::move(*begun);
    for (const PackerJob& job : jobs) jobs_.push_back(std::make_shared<const OwnedJob>(job));
    return {};
  }

  Result<void> copy_layers(std::uint32_t first, std::uint32_t end) override {
    const std::size_t num_layers = shared_->packer->layout().layers.size();
    const bool is_whole = first == 0 && end == num_layers;
    if (first != next_layer_ || end <= first || end > num_layers || (!gathers_ && !is_whole))
      return Error{ErrorCode::kInvalidArgument,
                   "the simulated packer copies layers in order, and scatters all at once"};
    next_layer_ = end;
    *is_over_ = false;
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      give(jobs_[i], first, end);
      // If the device refuses an event, the launch of the following work is refused.
      if (Result<DeviceEvent> event = DeviceEvent::record(device_, stream_); !event) {
        device_.enqueue(stream_, [over = is_over_] { return *over = true; });
        return std::move(event).error();
      }
    }
    return {};
  }

  Result<void> finish() override {
    if (wants_checksums_) {
      hashed += 1;
      std::vector<std::span<const std::byte>> ranges;
      for (const auto& owned : jobs_) {
        const std::uint64_t bytes = owned->job.chunk_tokens * shared_->packer->chunk_bytes_per_token();
        const std::span<const std::byte> chunk(owned->job.chunk, bytes);
        ranges.push_back(owned->job.hashed.empty() ? chunk : owned->job.hashed);
      }
      Result<std::unique_ptr<Device::Checksums>> sums = device_.checksums(ranges, stream_);
      device_.enqueue(stream_, [over = is_over_] { return *over = true; });
      if (!sums) return std::move(sums).error();
      checksums_ = std::move(*sums);
    } else {
      device_.enqueue(stream_, [over = is_over_] { return *over = true; });
    }
    Result<DeviceEvent> done = DeviceEvent::record(device_, stream_);
    if (!done) return std::move(done).error();
    done_ = std::move(*done);
    return {};
  }

  Result<bool> is_done() const override { return done_.is_reached(); }

  Result<std::vector<std::uint64_t>> wait() override {
    if (Result<void> ok = done_.wait(); !ok) return std::move(ok).error();
    if (checksums_) return checksums_->take();
    return std::vector<std::uint64_t>{};
  }

 private:
  void give(const std::shared_ptr<const OwnedJob>& owned, std::uint32_t first, std::uint32_t end) {
    device_.enqueue(stream_, [owned, shared = shared_, gathers = gathers_, first, end] {
      const PackerJob& job = owned->job;
      if (!gathers) {
        KVFERRY_CHECK(
            shared->packer->scatter({job.chunk, job.chunk_bytes}, job.chunk_tokens, job.skip_tokens, owned->run()),
            "a scatter fails late");
        return true;
      }
      std::vector<std::byte> whole(job.chunk_bytes);
      KVFERRY_CHECK(shared->packer->gather(owned->run(), whole), "a gather fails late");
      const std::size_t layer_bytes =
          job.run.num_tokens * shared->packer->chunk_bytes_per_token() / shared->packer->layout().layers.size();
      std::memcpy(job.chunk + first * layer_bytes, whole.data() + first * layer_bytes, (end - first) * layer_bytes);
      return true;
    });
  }

  SimDevice& device_;
  std::shared_ptr<Shared> shared_;
  DeviceStream stream_;
  bool gathers_, wants_checksums_;
  std::uint32_t next_layer_ = 0;
  std::vector<std::shared_ptr<const OwnedJob>> jobs_;
  DeviceEvent begun_, done_;
  std::unique_ptr<Device::Checksums> checksums_;
  std::shared_ptr<std::atomic<bool>> is_over_ = std::make_shared<std::atomic<bool>>(true);
};

class SimPacker final : public StreamPacker {
 public:
  SimPacker(std::shared_ptr<SimDevice> device, std::unique_ptr<Packer> packer, ChunkShape shape)
      : device_(std::move(device)), shared_(std::make_shared<Shared>()), shape_(shape) {
    shared_->packer = std::move(packer);
  }
  std::uint32_t num_layers() const override { return static_cast<std::uint32_t>(layout().layers.size()); }
  std::uint64_t chunk_bytes_per_token() const override { return shared_->packer->chunk_bytes_per_token(); }

  Result<std::unique_ptr<Pass>> gather(std::span<const PackerJob> jobs, DeviceStream stream,
                                       bool wants_checksums) override {
    for (const PackerJob& job : jobs)
      if (Result<void> ok = check_gather(layout(), shape_, job.run, job.chunk_bytes); !ok) return std::move(ok).error();
    return start(jobs, stream, true, wants_checksums);
  }
  Result<std::unique_ptr<Pass>> scatter(std::span<const PackerJob> jobs, DeviceStream stream,
                                        bool wants_checksums) override {
    for (const PackerJob& job : jobs) {
      Result<void> ok = check_scatter(layout(), shape_, job.run, job.chunk_bytes, job.chunk_tokens, job.skip_tokens);
      if (!ok) return std::move(ok).error();
    }
    return start(jobs, stream, false, wants_checksums);
  }

 private:
  const KvLayout& layout() const { return shared_->packer->layout(); }
  Result<std::unique_ptr<Pass>> start(std::span<const PackerJob> jobs, DeviceStream stream, bool gathers,
                                      bool wants_checksums) {
    auto pass = std::make_unique<SimPass>(*device_, shared_, stream, gathers, wants_checksums);
    if (Result<void> ok = pass->start(jobs); !ok) return std::move(ok).error();
    return std::unique_ptr<Pass>(std::move(pass));
  }

  std::shared_ptr<SimDevice> device_;
  std::shared_ptr<Shared> shared_;
  ChunkShape shape_;
};

}  // namespace

Gpu make_sim_gpu(std::shared_ptr<SimDevice> device) {
  return {device, [device](KvLayout layout, ChunkFormat format) -> Result<std::unique_ptr<StreamPacker>> {
            Result<ChunkShape> shape = resolve(layout, format);
            if (!shape) return std::move(shape).error();
            Result<std::unique_ptr<Packer>> packer = make_host_packer(std::move(layout), std::move(format));
            if (!packer) return std::move(packer).error();
            return std::unique_ptr<StreamPacker>(std::make_unique<SimPacker>(device, std::move(*packer), *shape));
          }};
}

std::uint64_t num_passes_ended_early() { return ended_early; }
std::uint64_t num_passes_hashed() { return hashed; }

}  // namespace kvferry
