#include "tests/gpu/gpu_pair.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <sstream>

#include "tests/transport/hex.h"
#include "tests/transport/ucx_over_tcp.h"
#include "transport/base/check.h"
#include "transport/make_transport.h"

namespace kvferry {
namespace {

Result<void> wait_for_copy(Device& device, const DeviceCopy& copy) {
  Result<DeviceStream> stream = device.make_stream();
  if (!stream) return std::move(stream).error();
  Result<void> ok = device.copy(std::span(&copy, 1), *stream);
  if (ok) {
    Result<DeviceEvent> done = DeviceEvent::record(device, *stream);
    ok = done ? done->wait() : Result<void>(std::move(done).error());
  }
  device.drop_stream(*stream);
  return ok;
}

}  // namespace

Result<std::unique_ptr<Transport>> make_gpu_transport(std::string_view backend, Device& device) {
  if (backend == "ucx") {
    let_ucx_use_tcp();
    UcxOptions options;
    options.device = &device;
    return make_ucx_transport(options);
  }
  if (backend == "nccl") {
    // NCCL refuses two ranks on one GPU unless it takes their hosts for different ones.
    ::setenv("NCCL_HOSTID", fmt::format("kvferry-{}", ::getpid()).c_str(), 1);
    NcclOptions options;
    options.device = &device;
    options.control.listen_host = "127.0.0.1";
    return make_nccl_transport(options);
  }
  KVFERRY_CHECK(backend == "gpu_ipc", "no backend is called {}", backend);
  GpuIpcOptions options;
  options.device = &device;
  return make_gpu_ipc_transport(options);
}

Result<std::unique_ptr<GpuPair>> GpuPair::start(std::string_view backend, std::uint64_t bytes) {
  Result<Gpu> gpu = open_gpu(0);
  if (!gpu) return std::move(gpu).error();
  std::unique_ptr<GpuPair> pair(new GpuPair);
  pair->gpu_ = std::move(*gpu);
  pair->bytes_ = bytes;
  Result<std::byte*> memory = pair->device().allocate(MemoryKind::kDevice, bytes);
  if (!memory) return std::move(memory).error();
  pair->memory_ = *memory;
  Result<std::unique_ptr<Transport>> transport = make_gpu_transport(backend, pair->device());
  if (!transport) return std::move(transport).error();
  pair->transport_ = std::move(*transport);
  MemoryRegion region{pair->memory_, bytes};
  region.device = &pair->device();
  Result<RegionId> id = pair->transport_->register_region(region);
  if (!id) return std::move(id).error();
  pair->region_ = *id;
  if (Result<void> ok = pair->spawn(backend); !ok) return std::move(ok).error();
  return pair;
}

Result<void> GpuPair::spawn(std::string_view backend) {
  child_ = KVFERRY_TRY(ChildProcess::start("gpu_far_side", {std::string(backend), std::to_string(bytes_)}));
  const std::string line = child_->read_line();
  std::istringstream words(line);
  std::string ready, address, region;
  words >> ready >> address >> region;
  if (ready != "ready") return Error{ErrorCode::kUnavailable, fmt::format("the other process said '{}'", line)};
  far_region_ = from_hex(region);
  Result<PeerId> peer = transport_->connect(from_hex(address));
  if (!peer) return std::move(peer).error();
  peer_ = *peer;
  return {};
}

GpuPair::~GpuPair() {
  if (transport_ != nullptr) transport_->shutdown();
  child_.reset();
  transport_.reset();
  if (memory_ != nullptr) device().release(MemoryKind::kDevice, memory_);
}

Completion GpuPair::move(Direction direction, std::vector<CopyRange> ranges, std::vector<std::uint64_t> checksums,
                         std::string notification) {
  PagedTransfer transfer{peer_, direction, region_, far_region_, std::move(ranges), std::move(notification)};
  transfer.checksums = std::move(checksums);
  const Result<TransferId> id = transport_->submit(std::move(transfer));
  KVFERRY_CHECK(id, "{}", id.error().what);
  std::vector<Completion> completions;
  while (completions.empty()) {
    transport_->wait(kSecond);
    completions = transport_->poll();
  }
  return completions.front();
}

std::vector<std::byte> GpuPair::read() {
  std::byte* const pinned = device().allocate(MemoryKind::kPinned, bytes_).value();
  const Result<void> ok = wait_for_copy(device(), {pinned, memory_, bytes_});
  KVFERRY_CHECK(ok, "{}", ok.error().what);
  std::vector<std::byte> bytes(pinned, pinned + bytes_);
  device().release(MemoryKind::kPinned, pinned);
  return bytes;
}

void GpuPair::write(const std::vector<std::byte>& bytes) {
  std::byte* const pinned = device().allocate(MemoryKind::kPinned, bytes_).value();
  std::copy(bytes.begin(), bytes.end(), pinned);
  const Result<void> ok = wait_for_copy(device(), {memory_, pinned, bytes_});
  KVFERRY_CHECK(ok, "{}", ok.error().what);
  device().release(MemoryKind::kPinned, pinned);
}

std::vector<CopyRange> shuffled_blocks(std::uint64_t bytes, std::uint64_t block_bytes, std::uint32_t seed) {
  std::vector<std::uint64_t> here(bytes / block_bytes), there;
  std::iota(here.begin(), here.end(), 0);
  there = here;
  std::mt19937 random(seed);
  std::shuffle(here.begin(), here.end(), random);
  std::shuffle(there.begin(), there.end(), random);
  std::vector<CopyRange> ranges;
  for (std::size_t i = 0; i < here.size(); ++i)
    ranges.push_back({here[i] * block_bytes, there[i] * block_bytes, block_bytes});
  return ranges;
}

}  // namespace kvferry
