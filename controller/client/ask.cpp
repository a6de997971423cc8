#include "controller/client/ask.h"

#include <poll.h>

#include <algorithm>

#include "controller/client/client_link.h"
#include "transport/base/clock.h"

namespace kvferry::controller {

Result<wire::Message> ask(const std::string& endpoint, std::string_view question, std::int64_t timeout_ms) {
  // Thousands of nodes fill more than a message may have otherwise; the user chose whom to ask.
  Result<std::unique_ptr<ClientLink>> made = make_link(endpoint, {.is_bounded = false});
  if (!made) return std::move(made).error();
  ClientLink& link = **made;
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + timeout_ms * kMillisecond;
  bool has_asked = false;
  for (;;) {
    link.process(clock.now());
    if (!has_asked) has_asked = link.send(question);
    if (const auto bytes = link.receive()) {
      Result<wire::Message> message = wire::parse(*bytes);
      if (!message) return message;
      if (auto* refused = std::get_if<wire::Refused>(&*message)) return Error{ErrorCode::kRefused, refused->reason};
      return message;
    }
    if (link.has_broken()) has_asked = false;
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
