// One well-formed example of every message. The fuzzers' seeds and lies are made from these examples. An example has a
// value in each field. A message of the controller without an example here is a default message.
#pragma once

#include <string>
#include <vector>

#include "connector/runtime/links/node_wire.h"
#include "controller/protocol/messages.h"

namespace kvferry::fuzz {

controller::NodeReport example_report();
/// Returns an example of every alternative, each once.
std::vector<controller::wire::FromNode> examples_from_node();
std::vector<controller::wire::FromController> examples_from_controller();
/// Returns at least one example of every alternative.
std::vector<AnyMessage> examples_between_nodes();

std::string encoded(const controller::wire::FromNode& message);
std::string encoded(const controller::wire::FromController& message);
/// Returns the encoded message in an envelope with this id.
std::string encoded(const AnyMessage& message, std::uint64_t id = 1);

}  // namespace kvferry::fuzz
