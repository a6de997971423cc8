#include "tests/gpu/device_cache.h"

#include <cuda_runtime.h>

#include "transport/base/check.h"

namespace kvferry {
namespace {

void must(cudaError_t code) { KVFERRY_CHECK(code == cudaSuccess, "CUDA: {}", cudaGetErrorString(code)); }

}  // namespace

std::string why_no_gpu() {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  return code == cudaSuccess ? "" : cudaGetErrorString(code);
}

DeviceBytes::DeviceBytes(std::size_t size) : size_(size) {
  void* memory = nullptr;
  must(cudaMalloc(&memory, std::max<std::size_t>(size, 1)));
  data_ = static_cast<std::byte*>(memory);
}
DeviceBytes::DeviceBytes(std::span<const std::byte> bytes) : DeviceBytes(bytes.size()) { set(bytes); }
DeviceBytes::~DeviceBytes() { cudaFree(data_); }

void DeviceBytes::set(std::span<const std::byte> bytes) {
  KVFERRY_CHECK(bytes.size() == size_, "{} bytes for {}", bytes.size(), size_);
  must(cudaMemcpy(data_, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
}

std::vector<std::byte> DeviceBytes::get() const {
  std::vector<std::byte> bytes(size_);
  must(cudaMemcpy(bytes.data(), data_, size_, cudaMemcpyDeviceToHost));
  return bytes;
}

DeviceCache::DeviceCache(const CacheShape& shape) : bytes_(TestCache(shape).memory().size()) {
  const TestCache on_host(shape);
  const auto moved =
      reinterpret_cast<std::uint64_t>(bytes_.data()) - reinterpret_cast<std::uint64_t>(on_host.memory().data());
  layout_ = on_host.layout();
  for (LayerLayout& layer : layout_.layers) {
    layer.key.base += moved;
    layer.value.base += moved;
  }
}

}  // namespace kvferry
