// One node and several controllers that each follow it: a client made of clients.
#pragma once

#include <memory>
#include <vector>

#include "controller/api/client.h"

namespace kvferry::controller {

/// Every controller is told everything, and registers the node on its own; look-ups go to the first that did. When that
/// one is lost, those without an answer are asked again at the next. Registered and Lost tell of the first that is
/// there and the last that went; Refused comes when nobody is left who did not refuse. What one of them misses
/// (SnapshotWanted) is published to all, which changes nothing at the others.
/// With lookup_timeout_ms each look-up ends in an answer or in LookupFailed, also where nobody is registered at first
/// or an answer gets lost. `clients`: in order of preference, at least one.
Result<std::unique_ptr<Client>> make_replica_client(std::vector<std::unique_ptr<Client>> clients,
                                                    const ClientOptions& options);

}  // namespace kvferry::controller
