// CUDA without a GPU; see cudart.cpp.
#pragma once

#include "tests/device/sim_device.h"

namespace kvferry {

/// Returns the only GPU of the process.
SimDevice& host_gpu();

/// Returns how often memory of other processes was opened and not closed again.
int host_gpu_opened();

}  // namespace kvferry
