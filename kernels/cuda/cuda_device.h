// Device for a CUDA GPU.
#pragma once

#include <memory>

#include "transport/base/device.h"

namespace kvferry {

/// Errors: kUnavailable if CUDA has no GPU with this number.
Result<std::shared_ptr<Device>> make_cuda_device(int ordinal);

}  // namespace kvferry
