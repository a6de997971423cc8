// Counts the GPUs of a host, and explains why it has none that can be used.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "transport/base/result.h"

namespace kvferry {

/// Explains why cudaGetDeviceCount() failed with `code`. `driver`: version of CUDA that the host's driver is for, as
/// cudaDriverGetVersion() returns it; 0: the host has no driver.
std::string explain_no_gpus(cudaError_t code, int driver);

/// Returns the number of GPUs that CUDA finds. Errors: kUnavailable, with a sentence that says why CUDA finds none.
Result<int> count_gpus();

}  // namespace kvferry
