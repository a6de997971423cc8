#include "launch/cli/explain/ask_nodes.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <span>

#include "connector/runtime/links/peer_links.h"

namespace kvferry::cli {
namespace {

constexpr std::int64_t kUnixMsMax = 4'000'000'000'000;  // a time in the year 2096; in nanoseconds it fits 64 bits

void take(const PeerLinks::Received& received, TimeNs asked_at, TimeNs now, std::span<NodeAnswer> answers) {
  const auto node = std::ranges::find_if(
      answers, [&](const NodeAnswer& answer) { return answer.endpoint == received.endpoint && !answer.has_answered; });
  const Result<Envelope> envelope = decode<Envelope>(received.bytes, "node's answer");
  if (node == answers.end() || !envelope) return;
  Result<LivesAnswer> answer = Error{ErrorCode::kCorrupt, ""};
  if (envelope->type == kMessageType<LivesAnswer>) answer = decode<LivesAnswer>(envelope->body, "node's answer");
  if (!answer) return;
  node->has_answered = true;
  node->error = (now - asked_at) / 2;
  node->at = asked_at + node->error;
  node->lives = std::move(answer->lives);
  if (answer->unix_ms <= 0 || answer->unix_ms > kUnixMsMax) return;
  const auto ours = std::chrono::system_clock::now().time_since_epoch() - std::chrono::nanoseconds(node->error);
  node->clock_ahead = answer->unix_ms * kMillisecond - std::chrono::nanoseconds(ours).count();
}

/// Asks up to kPeersMax nodes, each over a socket of its own.
void ask_some(std::span<NodeAnswer> answers, const LivesRequest& request, const ZmqContextRef& context,
              TimeNs timeout) {
  const SteadyClock clock;
  PeerLinks links(clock, kPeersMax, context);
  const TimeNs asked_at = clock.now();
  for (const NodeAnswer& node : answers) links.send(node.endpoint, seal(1, request, kNodeWire.oldest));
  while (!std::ranges::all_of(answers, &NodeAnswer::has_answered)) {
    while (const auto received = links.receive()) take(*received, asked_at, clock.now(), answers);
    const TimeNs left = asked_at + timeout - clock.now();
    if (left <= 0) return;
    std::vector<pollfd> fds;
    links.add_to(fds);
    ::poll(fds.data(), fds.size(), static_cast<int>(std::min<TimeNs>(left / kMillisecond + 1, 50)));
  }
}

}  // namespace

std::vector<NodeAnswer> ask_nodes(const std::vector<controller::NodeStatus>& nodes, const LivesRequest& request,
                                  const std::optional<net::ClusterKey>& key, TimeNs timeout) {
  std::vector<NodeAnswer> answers;
  for (const controller::NodeStatus& node : nodes) answers.push_back({node.engine_id.value, node.role, node.endpoint});
  ZmqContextRef context;
  if (key) context = std::make_shared<net::ZmqContext>(net::ZmqContext::kSocketsMaxDefault, key, net::Servers::kNodes);
  for (std::size_t first = 0; first < answers.size(); first += kPeersMax)
    ask_some(std::span(answers).subspan(first, std::min(kPeersMax, answers.size() - first)), request, context, timeout);
  return answers;
}

}  // namespace kvferry::cli
