// Runs the host packer's copies as work of a simulated GPU: late, and in pieces.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/stream_packer.h"
#include "tests/device/sim_device.h"

namespace kvferry {

/// Returns a Gpu whose layouts have their blocks in host memory, which the device's work reads and writes.
/// SimDevice::refuse_next() can make every call fail, and the launch of a pass also in its middle.
Gpu make_sim_gpu(std::shared_ptr<SimDevice> device);

/// Returns how many passes, of all packers, were destroyed before the device had finished them. On a real GPU the host
/// waits in this case.
std::uint64_t num_passes_ended_early();
/// Returns how many passes computed checksums.
std::uint64_t num_passes_hashed();

}  // namespace kvferry
