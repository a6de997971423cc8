// Functions of CUDA's driver. CUDA's runtime looks them up, so that programs also start where there is no driver.
#pragma once

#include "transport/base/result.h"

namespace kvferry {

/// Returns a function of the driver, which the caller casts to its type. `since`: the version of CUDA that gave the
/// function its present form, such as 3020. Makes no context. Errors: kUnavailable if there is no driver, or if it
/// lacks the function.
Result<void*> driver_function(const char* name, unsigned since);

}  // namespace kvferry
