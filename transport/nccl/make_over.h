// The NCCL transport over any source of communicators: NCCL itself, or a simulation of it.
#pragma once

#include <memory>

#include "transport/make_transport.h"
#include "transport/nccl/communicators.h"

namespace kvferry::nccl {

/// Errors: as make_nccl_transport().
Result<std::unique_ptr<Transport>> make_transport_over(std::unique_ptr<Communicators> communicators,
                                                       const NcclOptions& options);

}  // namespace kvferry::nccl
