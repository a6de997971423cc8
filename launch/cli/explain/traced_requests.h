// Finds the requests of a W3C trace. One trace may have many requests, such as all those of an agent.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/cli/explain/ask_nodes.h"

namespace kvferry::cli {

/// Returns the trace id in a text that is a trace id or a whole traceparent ("00-TRACE-SPAN-FLAGS"); an empty text if
/// the text is neither.
std::string trace_id_in(std::string_view text);

/// Splits answers about the lives of several requests into those of each request, the oldest request first. Lives are
/// of one request if a hand-off connects them, or if their ids differ only in the suffix that vLLM chooses on each
/// node.
std::vector<std::vector<NodeAnswer>> split_by_request(const std::vector<NodeAnswer>& answers);

}  // namespace kvferry::cli
