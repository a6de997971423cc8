// The other process of a GpuPair. Exports argv[2] bytes of GPU memory over backend argv[1] until its stdin ends. Prints
// "ready <address> <region>" in hex, or the reason why it can't export memory.
#include <poll.h>
#include <unistd.h>

#include <iostream>
#include <string>
#include <vector>

#include "tests/gpu/gpu_pair.h"
#include "tests/transport/hex.h"

namespace kvferry {
namespace {

Result<void> serve(const std::string& backend, std::uint64_t bytes) {
  Result<Gpu> gpu = open_gpu(0);
  if (!gpu) return std::move(gpu).error();
  Device& device = *gpu->device;
  Result<std::byte*> memory = device.allocate(MemoryKind::kDevice, bytes);
  if (!memory) return std::move(memory).error();
  Result<std::byte*> pattern = device.allocate(MemoryKind::kPinned, bytes);
  if (!pattern) return std::move(pattern).error();
  for (std::uint64_t i = 0; i < bytes; ++i) (*pattern)[i] = far_byte(i);
  const DeviceCopy copy{*memory, *pattern, bytes};
  if (Result<void> ok = device.copy(std::span(&copy, 1), nullptr); !ok) return ok;
  Result<DeviceEvent> filled = DeviceEvent::record(device, nullptr);
  if (!filled) return std::move(filled).error();
  if (Result<void> ok = filled->wait(); !ok) return ok;

  Result<std::unique_ptr<Transport>> transport = make_gpu_transport(backend, device);
  if (!transport) return std::move(transport).error();
  MemoryRegion region{*memory, bytes};
  region.device = &device;
  Result<RegionId> id = (*transport)->register_region(region);
  if (!id) return std::move(id).error();
  std::cout << "ready " << to_hex((*transport)->address()) << ' ' << to_hex((*transport)->export_region(*id).value())
            << std::endl;
  pollfd fds[] = {{STDIN_FILENO, POLLIN, 0}, {(*transport)->event_fd(), POLLIN, 0}};
  while (fds[0].revents == 0) {
    ::poll(fds, 2, -1);
    static_cast<void>((*transport)->poll_notifications());
  }
  (*transport)->shutdown();
  return {};
}

}  // namespace
}  // namespace kvferry

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  if (const kvferry::Result<void> ok = kvferry::serve(argv[1], std::stoull(argv[2])); !ok) {
    std::cout << ok.error().what << std::endl;
    return 1;
  }
  return 0;
}
