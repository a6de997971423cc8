// CUDA without a GPU: see cudart.cpp.
#pragma once

#include "tests/device/sim_device.h"

namespace kvferry {

/// The one GPU of the process.
SimDevice& host_gpu();

}  // namespace kvferry
