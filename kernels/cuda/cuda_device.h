// A CUDA GPU as a Device.
#pragma once

#include <memory>

#include "transport/base/device.h"

namespace kvferry {

/// kUnavailable: there is no GPU of this number that CUDA can use, and why.
Result<std::shared_ptr<Device>> make_cuda_device(int ordinal);

}  // namespace kvferry
