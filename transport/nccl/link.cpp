#include "transport/nccl/link.h"

#include <algorithm>

namespace kvferry::nccl {
namespace {

constexpr TimeNs kIdlePings = 20;  // pings to an idle peer are rarer by this factor

}  // namespace

Result<void> Link::open_channel(bool is_pull, const std::string& id, int rank, Role role) {
  channels_[is_pull ? 0 : 1] =
      KVFERRY_TRY(Channel::open(context_.device, context_.staging, context_.communicators, id, rank, role));
  return {};
}

void Link::advance() {
  if (!is_lost_) watch();
  for (const bool is_pull : {true, false}) {
    std::unique_ptr<Channel>& one = channels_[is_pull ? 0 : 1];
    if (one == nullptr) continue;
    std::vector<Channel::Report> reports;
    one->advance(context_.now, reports);
    for (Channel::Report& report : reports) on_report(is_pull, report);
    if (one->is_failed() && !is_lost_) lose("the NCCL communicator or the GPU failed: " + one->why());
    const TimeNs hung_ns = context_.options.hung_ns;
    if (!is_lost_ && one->progressed_at() != 0 && context_.now - one->progressed_at() >= hung_ns)
      lose(fmt::format("the NCCL communicator made no progress for {} ms, so the connection was ended",
                       hung_ns / kMillisecond));
  }
  advance_work();
  if (!is_lost_ || !is_quiet()) return;
  for (std::unique_ptr<Channel>& one : channels_) one = nullptr;
}

void Link::watch() {
  if (peer_->is_lost()) return lose(peer_->why(), false);
  if (context_.now < ping_at()) return;
  pinged_at_ = context_.now;
  send(Kind::kPing, context_.control.address());
}

TimeNs Link::ping_at() const {
  const TimeNs period = context_.options.silence_ns / 4 * (is_owed() ? 1 : kIdlePings);
  return std::max(peer_->alive_at(), pinged_at_) + period;
}

TimeNs Link::next_deadline() const { return is_lost_ ? INT64_MAX : ping_at(); }

void Link::lose(const std::string& why, bool notify_peer) {
  if (std::exchange(is_lost_, true)) return;
  if (notify_peer) send(Kind::kBye, Bye{why});
  for (const std::unique_ptr<Channel>& one : channels_) {
    if (one != nullptr) one->abort();
  }
  on_lost(why);
}

bool Link::is_quiet() const {
  return is_lost_ && std::all_of(channels_.begin(), channels_.end(),
                                 [](const auto& one) { return one == nullptr || one->is_quiet(); });
}

bool Link::needs_polling() const {
  return std::any_of(channels_.begin(), channels_.end(),
                     [](const auto& one) { return one != nullptr && one->is_busy(); });
}

}  // namespace kvferry::nccl
