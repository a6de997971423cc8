// The two forms of ZeroMQ endpoint that kvferry accepts, checked before ZeroMQ sees them: its own message is just
// "Invalid argument".
#pragma once

#include <string_view>

#include "transport/base/result.h"

namespace kvferry::controller {

enum class EndpointUse { kBind, kConnect };  // port 0 (any free one) is allowed for kBind only

/// kInvalidArgument: not tcp://HOST:PORT or ipc://PATH; the sentence tells what is allowed.
Result<void> check_endpoint(std::string_view endpoint, EndpointUse use);

}  // namespace kvferry::controller
