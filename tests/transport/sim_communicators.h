// Simulates NCCL for the transport. Ranks in two processes meet at an abstract Unix socket. Sending and receiving is
// work in the streams of simulated GPUs.
#pragma once

#include <atomic>
#include <memory>

#include "tests/device/sim_device.h"
#include "transport/nccl/communicators.h"

namespace kvferry {

struct SimNccl {
  /// What a rank notices when the other rank dies. kHangs: nothing; its streams wait until they are aborted. kFails: a
  /// failure, but its streams wait too.
  enum class Death { kHangs, kFails };
  Death death = Death::kHangs;
  std::uint32_t seed = 1;
  /// From now on, no send or receive of any rank in this process ends by itself.
  std::shared_ptr<std::atomic<bool>> is_hung = std::make_shared<std::atomic<bool>>(false);
  /// Number of communicators that are not aborted yet.
  std::shared_ptr<std::atomic<int>> num_alive = std::make_shared<std::atomic<int>>(0);
};

/// A send ends when the other rank has received it. The device must outlive all communicators.
std::unique_ptr<nccl::Communicators> make_sim_communicators(SimDevice& device, SimNccl options = {});

/// Returns the GPU that the simulated backends of this process share.
inline SimDevice& process_gpu() {
  static SimDevice device(1, SimDevice::Drive::kInBackground);
  return device;
}

}  // namespace kvferry
