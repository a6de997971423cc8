// One request to a controller and its reply, over a connection of its own: status and admin commands.
#include <poll.h>

#include <algorithm>

#include "controller/api/admin_command.h"
#include "controller/api/status.h"
#include "controller/client/client_link.h"
#include "controller/protocol/wire.h"
#include "transport/base/clock.h"
#include "transport/base/printable.h"

namespace kvferry::controller {
namespace {

using Key = std::optional<net::ClusterKey>;

Result<wire::FromController> ask(const std::string& endpoint, std::string_view request, std::int64_t timeout_ms,
                                 const Key& key) {
  // The connection accepts replies of any size: the status of thousands of nodes can exceed kMessageBytesMax, and the
  // user trusts this controller.
  std::unique_ptr<ClientLink> made = KVFERRY_TRY(make_link(endpoint, {.is_bounded = false, .cluster_key = key}));
  ClientLink& link = *made;
  const SteadyClock clock;
  const TimeNs deadline = clock.now() + timeout_ms * kMillisecond;
  bool is_sent = false;
  for (;;) {
    link.process(clock.now());
    if (!is_sent) is_sent = link.send(request);
    if (const auto bytes = link.receive()) {
      wire::FromController message = KVFERRY_TRY(wire::parse<wire::FromController>(*bytes));
      if (auto* refused = std::get_if<wire::Refused>(&message))
        return Error{ErrorCode::kRefused, printable(refused->reason, kPeerTextMax)};
      return message;
    }
    if (link.has_broken()) is_sent = false;
    const TimeNs left = deadline - clock.now();
    if (left <= 0) {
      return Error{ErrorCode::kUnavailable, fmt::format("controller {} is not reachable: no answer within {} ms{}",
                                                        endpoint, timeout_ms, cluster_key_hint(key.has_value()))};
    }
    pollfd item{link.fd(), POLLIN, 0};
    ::poll(&item, 1, static_cast<int>(std::min<TimeNs>(left / kMillisecond + 1, 50)));
  }
}

/// Sends `request` and returns the reply. kCorrupt: the reply is of another type than `Reply`.
template <class Reply, class Request>
Result<Reply> ask_for(const std::string& endpoint, Request request, std::int64_t timeout_ms, const Key& key) {
  // The request has the oldest version, so that controllers of other releases can read it.
  request.header.version = wire::kProtocol.oldest;
  wire::FromController message = KVFERRY_TRY(ask(endpoint, encode(request), timeout_ms, key));
  if (auto* reply = std::get_if<Reply>(&message)) return std::move(*reply);
  return Error{ErrorCode::kCorrupt, fmt::format("controller {} answered with a message of another kind than requested; "
                                                "run this command with the controller's release of kvferry",
                                                endpoint)};
}

}  // namespace

Result<Status> fetch_status(const std::string& endpoint, std::int64_t timeout_ms, const Key& key) {
  wire::StatusReply reply = KVFERRY_TRY(ask_for<wire::StatusReply>(endpoint, wire::StatusRequest{}, timeout_ms, key));
  return std::move(reply.status);
}

Result<AdminResult> run_admin_command(const std::string& endpoint, const AdminCommand& command, std::int64_t timeout_ms,
                                      const Key& key) {
  const wire::AdminRequest request{.verb = command.verb,
                                   .name_space = command.name_space,
                                   .engine_id = command.engine_id,
                                   .other_engine_id = command.other_engine_id,
                                   .owner = command.owner,
                                   .keys = {command.keys},
                                   .ttl_ms = command.ttl_ms,
                                   .number = command.number};
  wire::AdminReply reply = KVFERRY_TRY(ask_for<wire::AdminReply>(endpoint, request, timeout_ms, key));
  if (!reply.is_done) return Error{ErrorCode::kRefused, std::move(reply.text)};
  return AdminResult{std::move(reply.text), reply.number};
}

}  // namespace kvferry::controller
