// A client of several controllers (replicas), made of one client for each.
#pragma once

#include <memory>
#include <vector>

#include "controller/api/client.h"

namespace kvferry::controller {

/// The node registers with each controller and publishes everything to each. Lookups go to the first controller that
/// it is registered with; when that one is lost, unanswered lookups are sent to the next. Registered is reported for
/// the first controller, Lost for the last one, Refused when all have refused. A SnapshotWanted of one is answered to
/// all, which changes nothing for the others.
/// With lookup_timeout_ms each lookup ends in LookupReply or LookupFailed, even if no controller is registered at first
/// or an answer is lost. `clients`: in order of preference, at least one.
Result<std::unique_ptr<Client>> make_replica_client(std::vector<std::unique_ptr<Client>> clients,
                                                    const ClientOptions& options);

}  // namespace kvferry::controller
