#include "controller/client/ask.h"

#include <poll.h>

#include <algorithm>

#include "controller/client/client_link.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

Result<wire::FromController> ask(const std::string& endpoint, std::string_view request, std::int64_t timeout_ms) {
  // The status of thousands of nodes exceeds kMessageBytesMax, and the user chose this controller.
  Result<std::unique_ptr<ClientLink>> made = make_link(endpoint, {.is_bounded = false});
  if (!made) return std::move(made).error();
  ClientLink& link = **made;
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + timeout_ms * kMillisecond;
  bool is_sent = false;
  for (;;) {
    link.process(clock.now());
    if (!is_sent) is_sent = link.send(request);
    if (const auto bytes = link.receive()) {
      Result<wire::FromController> message = wire::parse<wire::FromController>(*bytes);
      if (!message) return message;
      if (auto* refused = std::get_if<wire::Refused>(&*message)) return Error{ErrorCode::kRefused, refused->reason};
      return message;
    }
    if (link.has_broken()) is_sent = false;
    const TimeNs left = deadline - clock.now();
    if (left <= 0) {
      return Error{ErrorCode::kUnavailable,
                   fmt::format("controller {} not reachable within {} ms", endpoint, timeout_ms)};
    }
    pollfd item{link.fd(), POLLIN, 0};
    ::poll(&item, 1, static_cast<int>(std::min<TimeNs>(left / kMillisecond + 1, 50)));
  }
}

}  // namespace kvferry::controller
