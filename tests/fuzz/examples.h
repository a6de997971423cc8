// One well-formed example of every message, from which seeds and lies are made. It has something in each field, except
// that a message of the controller without an example here is a default one.
#pragma once

#include <string>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "controller/protocol/messages.h"

namespace kvferry::fuzz {

/// Every alternative once.
std::vector<controller::wire::FromNode> examples_from_node();
std::vector<controller::wire::FromController> examples_from_controller();
/// Every alternative at least once.
std::vector<AnyMessage> examples_between_nodes();

std::string encoded(const controller::wire::FromNode& message);
std::string encoded(const controller::wire::FromController& message);
/// In an envelope with this id.
std::string encoded(const AnyMessage& message, std::uint64_t id = 1);

}  // namespace kvferry::fuzz
