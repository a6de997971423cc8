#include "launch/cli/explain/event_text.h"

#include <algorithm>

#include "transport/base/printable.h"

namespace kvferry::cli {
namespace {

std::string node_name(const LifeEvent& event, const NodeNames& names) {
  const auto found = names.find(event.peer.view());
  return found == names.end() ? printable(event.peer.view()) : printable(short_name(found->second));
}

std::string size_text(const LifeEvent& event) {
  const double bytes = static_cast<double>(event.bytes), seconds = static_cast<double>(event.duration) * 1e-9;
  // A push may send layer by layer while the prompt is computed, so its duration can contain this computation.
  std::string text = fmt::format("{:.2f} MiB in {:.1f} ms{}", bytes / (1 << 20), seconds * 1e3,
                                 event.what() == LifeKind::kPushed ? " since the offer" : "");
  if (event.bytes == 0 || event.duration <= 0) return text;
  text += fmt::format(", {:.2f} GB/s", bytes / seconds * 1e-9);
  if (const double share = share_of_limit(event); share > 0)
    text += fmt::format(", {:.0f} % of this path's limit ({:.2f})", share * 100, event.limit_mb_per_s * 1e-3);
  return text;
}

std::string path_text(const LifeEvent& event) {
  return event.path.view().empty() ? "" : fmt::format(" over {}", printable(event.path.view()));
}

std::string transfer_text(std::string_view verb, std::string_view preposition, const LifeEvent& event,
                          const NodeNames& names) {
  std::string text = fmt::format("{} {} chunks {} {}{}: {}", verb, event.chunks, preposition, node_name(event, names),
                                 path_text(event), size_text(event));
  if (event.failed > 0) text += fmt::format("; {} chunks failed", event.failed);
  if (event.why() != Cause::kNone) text += ": " + cause_text(event, names);
  return text;
}

std::string arrival_text(const LifeEvent& event, const NodeNames& names) {
  std::string text = fmt::format("arrived with {} tokens, {} in the pool", event.tokens, event.local);
  if (!event.peer.view().empty())
    text += fmt::format(", {} handed over by {} as {}", event.expected, node_name(event, names),
                        printable(event.note.view()));
  return text;
}

std::string admission_text(const LifeEvent& event, const NodeNames& names) {
  const std::uint64_t here = std::uint64_t{event.local} + event.loaded;
  std::string text = fmt::format("admitted: {} tokens, {} local, {} from the pool, {} to compute", event.tokens,
                                 event.local, event.loaded, event.tokens - std::min<std::uint64_t>(event.tokens, here));
  if (const std::uint32_t again = recomputed_tokens(event); again > 0) text += fmt::format(", {} of them again", again);
  if (event.why() != Cause::kNone) text += ": " + cause_text(event, names);
  return text;
}

std::string load_text(const LifeEvent& event, const NodeNames& names) {
  std::string text =
      fmt::format("loaded {} of {} tokens into blocks: {}", event.loaded, event.expected, size_text(event));
  if (event.why() != Cause::kNone)
    text += fmt::format("; {} tokens are computed again: {}", recomputed_tokens(event), cause_text(event, names));
  return text;
}

std::string end_text(const LifeEvent& event) {
  std::string text = fmt::format("finished with {} tokens", event.tokens);
  if (event.expected > 0) text += fmt::format(", {} kept for a decode node", event.expected);
  if (event.why() != Cause::kNone) text += "; " + text_of(event.why());
  return text;
}

}  // namespace

std::string short_name(const std::string& engine_id) {
  constexpr std::size_t kLong = 20;
  return engine_id.size() < kLong ? engine_id : engine_id.substr(0, 8);
}

std::string kind_name(LifeKind kind) {
  constexpr std::string_view kNames[] = {"arrived",      "waits",        "answered",  "admitted", "load_began",
                                         "loaded",       "computed",     "preempted", "finished", "pulled",
                                         "fetch_failed", "push_offered", "pushed"};
  const auto number = static_cast<std::size_t>(kind);
  return number < std::size(kNames) ? std::string(kNames[number]) : fmt::format("kind_{}", number);
}

std::string cause_text(const LifeEvent& event, const NodeNames& names) {
  std::string details = node_name(event, names);
  if (!event.note.view().empty()) details += (details.empty() ? "" : ": ") + printable(event.note.view());
  return text_of(event.why()) + (details.empty() ? "" : fmt::format(" ({})", details));
}

std::string event_text(const LifeEvent& event, const NodeNames& names) {
  switch (event.what()) {
    case LifeKind::kArrived:
      return arrival_text(event, names);
    case LifeKind::kWaits:
      return "waits for KV of other nodes";
    case LifeKind::kAnswered:
      return fmt::format("waits no longer: {} tokens local, {} more in the pool", event.local, event.loaded);
    case LifeKind::kAdmitted:
      return admission_text(event, names);
    case LifeKind::kLoadBegan:
      return "runs only after its KV is loaded";
    case LifeKind::kLoaded:
      return load_text(event, names);
    case LifeKind::kComputed:
      return "has computed every known token, and decodes";
    case LifeKind::kPreempted:
      return fmt::format("preempted with {} tokens computed", event.tokens);
    case LifeKind::kFinished:
      return end_text(event);
    case LifeKind::kPulled:
      return transfer_text("pulled", "from", event, names);
    case LifeKind::kFetchFailed:
      return "got no KV: " + cause_text(event, names);
    case LifeKind::kPushOffered:
      return fmt::format("offered {} chunks to {}", event.chunks, node_name(event, names));
    case LifeKind::kPushed:
      if (event.why() == Cause::kNone && event.note.view() == "announced")
        return fmt::format("announced {} chunks to {}, which pulls them: {:.1f} ms since the offer", event.chunks,
                           node_name(event, names), static_cast<double>(event.duration) * 1e-6);
      return transfer_text("pushed", "to", event, names);
  }
  return fmt::format("event {} of a newer release", event.kind);
}

double share_of_limit(const LifeEvent& event) {
  if (event.duration <= 0 || event.limit_mb_per_s == 0) return 0;
  // A rate in bytes per nanosecond is the same number in 10^9 bytes per second, the unit of limit_mb_per_s * 1e-3.
  return static_cast<double>(event.bytes) / static_cast<double>(event.duration) / (event.limit_mb_per_s * 1e-3);
}

}  // namespace kvferry::cli
