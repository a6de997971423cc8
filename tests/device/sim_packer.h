// The host packer's copies as work of a simulated GPU: late, and in pieces.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/stream_packer.h"
#include "tests/device/sim_device.h"

namespace kvferry {

/// The blocks of the layout lie in host memory that the device's work reads and writes. All calls can be refused by
/// SimDevice::refuse_next(); the launch of a pass may be refused in its middle.
Gpu make_sim_gpu(std::shared_ptr<SimDevice> device);

/// Passes of all packers that ended before the device was through with them: on a real GPU the host waits there.
std::uint64_t num_passes_ended_early();
/// Passes that took checksums.
std::uint64_t num_passes_hashed();

}  // namespace kvferry
