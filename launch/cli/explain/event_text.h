// Sentences about single events of a request's life, which is the sequence of the request's events on one node.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "connector/core/flight_recorder.h"

namespace kvferry::cli {

using NodeNames = std::map<std::string, std::string, std::less<>>;  // names of nodes by endpoint

/// Returns the engine id, or only its first 8 characters if it has 20 characters or more, like the UUIDs that vLLM
/// generates.
std::string short_name(const std::string& engine_id);
std::string kind_name(LifeKind kind);
/// Returns the event's cause, with the other node's name and the event's note in parentheses if the event has them:
/// "the other node refused (prefill-0: ...)".
std::string cause_text(const LifeEvent& event, const NodeNames& names);
std::string event_text(const LifeEvent& event, const NodeNames& names);
/// Returns the rate of a transfer divided by the limit of its path (LifeEvent::limit_mb_per_s); 0 if the rate or the
/// limit is not known.
double share_of_limit(const LifeEvent& event);

}  // namespace kvferry::cli
