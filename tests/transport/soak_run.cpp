#include "tests/transport/soak_run.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/transport/backends.h"
#include "tests/transport/process_fixture.h"
#include "transport/base/checksum.h"

namespace kvferry::soak {
namespace {

constexpr std::uint64_t kSlackBytes = std::uint64_t{32} << 20;  // how much the memory may grow after the warm-up
// The further three TCP connections of two links, at both ends. A link that was made just before the end of the warm-up
// opens them later, when the first long transfer needs them.
constexpr std::uint64_t kLazyFds = 2 * 3 * 2;
constexpr std::uint64_t kGuardBytes = 64;  // bytes behind a transfer's last byte that are checked too

void paint(std::span<std::byte> memory, std::uint64_t seed) {
  for (std::size_t at = 0; at < memory.size(); at += 8) {
    const std::uint64_t word = (seed + at) * 0x9E3779B97F4A7C15ULL ^ (seed >> 7);
    std::memcpy(memory.data() + at, &word, std::min<std::size_t>(8, memory.size() - at));
  }
}

bool are_equal(std::span<const std::byte> one, std::span<const std::byte> other) {
  return std::equal(one.begin(), one.end(), other.begin(), other.end());
}

std::vector<std::byte> copy_of(std::span<const std::byte> memory) { return {memory.begin(), memory.end()}; }

}  // namespace

Soak::Soak(Options options)
    : options_(std::move(options)),
      restart_every_(std::clamp<std::uint64_t>(options_.num_transfers / 8, 100, 2500)),
      shared_(SharedMemory::create("soak", kSlots / 2 * kSlotBytes).value()),
      plain_(kSlots / 2 * kSlotBytes),
      transport_(make_backend(options_.backend)),
      shared_region_(transport_->register_region(shared_.region()).value()),
      plain_region_(transport_->register_region(plain_.data(), plain_.size()).value()),
      notified_(options_.num_transfers) {
  for (std::uint32_t slot = 0; slot < kSlots; ++slot) free_.push_back(slot);
  for (std::uint32_t index = 0; index < 2; ++index) start_peer(index);
}

std::span<std::byte> Soak::local(std::uint32_t slot, std::uint64_t bytes) {
  std::byte* const base = slot % 2 == 0 ? shared_.data() : plain_.data();
  return {base + offset(slot), bytes};
}

std::span<std::byte> Soak::remote(std::uint32_t peer, std::uint32_t slot, std::uint64_t bytes) {
  return peers_[peer].remote->memory().subspan(remote_offset(slot), bytes);
}

void Soak::start_peer(std::uint32_t index) {
  Peer& peer = peers_[index];
  peer.remote.reset();
  peer.remote = make_remote_process(options_.backend, kSlots * kSlotBytes);
  ++peer.life;
  peer.stopped_until = 0;
  connect(index);
}

void Soak::connect(std::uint32_t index) {
  peers_[index].id = transport_->connect(peers_[index].remote->address()).value();
}

void Soak::allow(PeerId peer, ErrorCode code) {
  for (auto& [id, pending] : pending_) {
    if (pending.peer == peer) pending.allowed.insert(code);
  }
}

void Soak::resume(std::uint32_t index) {
  if (std::exchange(peers_[index].stopped_until, 0) != 0) peers_[index].remote->go_on();
}

void Soak::act(std::uint64_t number, const Plan& plan) {
  if (plan.event == Event::kStop) {
    resume(plan.peer);
    peers_[plan.peer].remote->stop();
    peers_[plan.peer].stopped_until = number + 3;
  } else if (plan.event == Event::kDisconnect) {
    allow(peers_[plan.peer].id, ErrorCode::kPeerLost);
    transport_->disconnect(peers_[plan.peer].id);
    connect(plan.peer);
  } else if (plan.event == Event::kKill || plan.event == Event::kQuit) {
    Peer& peer = peers_[1];
    allow(peer.id, ErrorCode::kPeerLost);
    if (plan.event == Event::kQuit) {
      resume(1);
      peer.remote->shut_down();
    }
    peer.remote->kill();
    if (plan.disconnects_late) {
      left_.push_back(peer.id);
    } else {
      transport_->disconnect(peer.id);
    }
    start_peer(1);
    ++num_restarts_;
  }
}

void Soak::prepare(Pending& pending) {
  const Plan& plan = pending.plan;
  const bool is_pull = plan.direction == Direction::kPull;
  const std::span<std::byte> here = local(pending.slot, plan.extent + kGuardBytes);
  const std::span<std::byte> there = remote(plan.peer, pending.slot, plan.extent + kGuardBytes);
  const std::span<std::byte> source = is_pull ? there : here;
  const std::span<std::byte> destination = is_pull ? here : there;
  if (plan.is_verified) {
    paint(source, plan.paint_seed);
    paint(destination, ~plan.paint_seed);
    pending.expected = copy_of(destination);
  }
  for (const CopyRange& range : plan.ranges) {
    const std::uint64_t from = is_pull ? range.remote_offset : range.local_offset;
    const std::uint64_t to = is_pull ? range.local_offset : range.remote_offset;
    if (plan.is_verified) std::memcpy(pending.expected.data() + to, source.data() + from, range.bytes);
    if (plan.has_checksums) pending.checksums.push_back(chunk_checksum(source.subspan(from, range.bytes)));
    num_bytes_ += range.bytes;
  }
  if (!plan.is_damaged) return;
  const std::size_t num_ranges = plan.ranges.size();
  std::size_t index = plan.paint_seed % num_ranges;
  while (plan.ranges[index].bytes == 0) index = (index + 1) % num_ranges;
  pending.damaged_range = static_cast<std::uint32_t>(index);
  pending.checksums[pending.damaged_range] ^= 1;
  pending.allowed = {ErrorCode::kCorrupt};
}

std::vector<CopyRange> Soak::part(const Pending& pending, std::uint32_t index) const {
  const std::size_t size = pending.plan.ranges.size();
  const std::size_t num_parts = pending.plan.num_feeds + 1;
  std::vector<CopyRange> ranges;
  for (std::size_t at = size * index / num_parts; at < size * (index + 1) / num_parts; ++at) {
    CopyRange range = pending.plan.ranges[at];
    range.local_offset += offset(pending.slot);
    if (!pending.grant) range.remote_offset += remote_offset(pending.slot);
    ranges.push_back(range);
  }
  return ranges;
}

std::vector<std::uint64_t> Soak::checksums_of(const Pending& pending, std::uint32_t index) const {
  if (!pending.plan.has_checksums) return {};
  const std::size_t size = pending.plan.ranges.size();
  const std::size_t num_parts = pending.plan.num_feeds + 1;
  const auto begin = pending.checksums.begin();
  return {begin + static_cast<std::ptrdiff_t>(size * index / num_parts),
          begin + static_cast<std::ptrdiff_t>(size * (index + 1) / num_parts)};
}

void Soak::submit(std::uint64_t number, Plan plan) {
  Pending pending;
  pending.number = number;
  pending.plan = std::move(plan);
  pending.slot = free_.front();
  const std::uint32_t peer = pending.plan.peer;
  pending.life = peers_[peer].life;
  pending.peer = peers_[peer].id;
  prepare(pending);
  if (pending.plan.is_granted) {
    resume(peer);
    pending.grant = peers_[peer].remote->grant(remote_offset(pending.slot), pending.plan.extent + 1);
  }
  PagedTransfer transfer;
  transfer.peer = pending.peer;
  transfer.direction = pending.plan.direction;
  transfer.local = local_region(pending.slot);
  transfer.remote_region = pending.grant ? pending.grant->exported : peers_[peer].remote->region();
  transfer.ranges = part(pending, pending.num_fed);
  transfer.checksums = checksums_of(pending, pending.num_fed++);
  transfer.notification = pending.plan.notification;
  transfer.priority = pending.plan.priority;
  transfer.is_fed = pending.plan.num_feeds > 0;
  if (pending.plan.is_bad) check_refusal(transfer);
  const Result<TransferId> id = transport_->submit(std::move(transfer));
  if (!id) return wrong(pending, "was not accepted: " + id.error().what);
  free_.pop_front();
  pending_.emplace(*id, std::move(pending));
}

void Soak::check_refusal(PagedTransfer transfer) {
  if (transfer.ranges.empty()) transfer.ranges.emplace_back();
  // also beyond the region's end if the region is rounded up to huge pages
  transfer.ranges.back().remote_offset = std::uint64_t{1} << 40;
  transfer.ranges.back().bytes = 1;
  transfer.checksums.clear();
  const Result<TransferId> id = transport_->submit(std::move(transfer));
  if (!id && id.error().code == ErrorCode::kInvalidArgument) return;
  ++num_wrong_;
  std::printf("wrong: a range beyond the peer's region was accepted\n");
}

void Soak::feed(TransferId id, Pending& pending, bool is_all) {
  while (pending.num_fed <= pending.plan.num_feeds) {
    const bool is_last = pending.num_fed == pending.plan.num_feeds;
    const std::uint32_t index = pending.num_fed++;
    // A transfer that fails meanwhile may refuse to be fed. Its Completion says why.
    const Result<void> fed = transport_->feed(id, part(pending, index), checksums_of(pending, index), is_last);
    if (!fed && pending.allowed.size() == 1 && !pending.plan.is_damaged)
      wrong(pending, "was not fed: " + fed.error().what);
    if (!is_all) return;
  }
}

void Soak::tend(std::uint64_t number, bool hurries) {
  for (std::uint32_t index = 0; index < 2; ++index) {
    if (number >= peers_[index].stopped_until) resume(index);
  }
  const auto is_due = [&](const Pending& pending, int after) {
    return after >= 0 && number >= pending.number + static_cast<std::uint64_t>(after);
  };
  for (auto& [id, pending] : pending_) {
    if (number > pending.number) feed(id, pending, hurries);
    if (!pending.is_cancelled && is_due(pending, pending.plan.cancel_after)) {
      pending.is_cancelled = true;
      pending.allowed.insert(ErrorCode::kCancelled);
      transport_->cancel(id);
    }
    if (pending.grant && !pending.is_revoked && is_due(pending, pending.plan.revoke_after)) revoke_early(pending);
  }
}

void Soak::revoke_early(Pending& pending) {
  Peer& peer = peers_[pending.plan.peer];
  if (peer.life != pending.life) return;  // the grant died with its process
  resume(pending.plan.peer);
  pending.allowed.insert(ErrorCode::kRefused);
  const ErrorCode code = peer.remote->revoke(pending.grant->id);
  if (code == ErrorCode::kFull) return;
  if (code != ErrorCode::kOk) wrong(pending, "has a grant that cannot be revoked");
  pending.is_revoked = true;
  if (options_.backend != "ucx_one_sided")
    pending.at_revoke = copy_of(remote(pending.plan.peer, pending.slot, pending.plan.extent));
}

void Soak::collect(bool waits) {
  if (waits) {
    int num_silent = 0;
    while (!transport_->wait(kSecond)) {
      if (++num_silent < 60) continue;
      for (const auto& [id, pending] : pending_) wrong(pending, "never completed");
      std::exit(1);
    }
  }
  for (const Completion& completion : transport_->poll()) finish(completion);
}

void Soak::finish(const Completion& completion) {
  const auto found = pending_.find(completion.id);
  if (found == pending_.end()) {
    ++num_wrong_;
    std::printf("wrong: transfer id %lu completed twice or was never submitted\n", completion.id.value);
    return;
  }
  Pending pending = std::move(found->second);
  pending_.erase(found);
  ++num_by_code_[completion.code];
  if (!pending.allowed.contains(completion.code))
    wrong(pending, fmt::format("ended with {}: {}", name_of(completion.code), completion.what));
  check_bytes(pending, completion);
  give_back(pending);
  if (completion.code == ErrorCode::kOk) {
    if (!pending.plan.notification.empty()) await_notification(pending);
    free_.push_back(pending.slot);
  } else {
    Resting resting{pending.slot, pending.number, {}};
    if (pending.plan.direction == Direction::kPull) resting.local = copy_of(local(pending.slot, pending.plan.extent));
    resting_.push_back(std::move(resting));
  }
}

void Soak::check_bytes(const Pending& pending, const Completion& completion) {
  const bool is_pull = pending.plan.direction == Direction::kPull;
  const bool is_alive = peers_[pending.plan.peer].life == pending.life;
  if (!is_pull && !is_alive) return;  // the memory is gone with its process
  if (completion.code == ErrorCode::kOk && pending.plan.is_verified) {
    ++num_verified_;
    const std::uint64_t bytes = pending.expected.size();
    const std::span<std::byte> got =
        is_pull ? local(pending.slot, bytes) : remote(pending.plan.peer, pending.slot, bytes);
    if (!are_equal(got, pending.expected)) wrong(pending, is_pull ? "pulled wrong bytes" : "pushed wrong bytes");
  }
  if (completion.code == ErrorCode::kCorrupt && completion.corrupt_ranges != std::vector{pending.damaged_range})
    wrong(pending, fmt::format("names other corrupt ranges than {}", pending.damaged_range));
  if (!is_pull && !pending.at_revoke.empty() &&
      !are_equal(remote(pending.plan.peer, pending.slot, pending.plan.extent), pending.at_revoke))
    wrong(pending, "wrote to a grant that had been taken back");
}

void Soak::give_back(Pending& pending) {
  Peer& peer = peers_[pending.plan.peer];
  if (!pending.grant || pending.is_revoked || peer.life != pending.life) return;
  resume(pending.plan.peer);
  // A peer may need a moment to update its records, or to notice that the connection is over.
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  ErrorCode code = peer.remote->revoke(pending.grant->id);
  while (code == ErrorCode::kFull && std::chrono::steady_clock::now() < deadline)
    code = peer.remote->revoke(pending.grant->id);
  if (code != ErrorCode::kOk) wrong(pending, fmt::format("left a grant behind: {}", name_of(code)));
}

void Soak::await_notification(const Pending& pending) {
  if (peers_[pending.plan.peer].life != pending.life) return;
  resume(pending.plan.peer);
  for (bool has_more = true; has_more && !notified_[pending.number];) read_notification(pending.plan.peer, has_more);
  if (!notified_[pending.number]) wrong(pending, "completed, but its notification did not arrive");
}

void Soak::read_notification(std::uint32_t peer, bool& has_more) {
  const std::vector<Notification> notes = peers_[peer].remote->wait_notifications(1);
  has_more = !notes.empty();
  for (const Notification& note : notes) {
    const std::uint64_t number = std::stoull(note.body);
    const Plan plan = make_plan(options_.seed, number, restart_every_, options_.without);
    if (number < notified_.size() && !notified_[number] && plan.notification == note.body &&
        note.from == transport_->address() && !plan.is_damaged) {
      notified_[number] = true;
    } else {
      ++num_wrong_;
      std::printf("wrong: transfer %lu was announced twice, damaged or by somebody else\n", number);
    }
  }
}

/// Waits until all transfers are complete. Then every slot must be free again, and every lost peer given up.
void Soak::settle() {
  for (std::uint32_t index = 0; index < 2; ++index) resume(index);
  while (!pending_.empty()) {
    tend(options_.num_transfers * 2, true);
    collect(true);
  }
  if (!resting_.empty()) ::usleep(20'000);
  for (const Resting& resting : resting_) {
    if (!are_equal(local(resting.slot, resting.local.size()), resting.local)) {
      ++num_wrong_;
      std::printf("wrong: the memory of transfer %lu was written after its completion\n", resting.number);
    }
    free_.push_back(resting.slot);
  }
  resting_.clear();
  for (const PeerId peer : left_) transport_->disconnect(peer);
  left_.clear();
}

void Soak::wrong(const Pending& pending, const std::string& what) {
  ++num_wrong_;
  const Plan& plan = pending.plan;
  std::printf("wrong: transfer %lu (%s, %zu ranges, %u feeds%s%s%s, peer %u) %s\n", pending.number,
              plan.direction == Direction::kPull ? "pull" : "push", plan.ranges.size(), plan.num_feeds,
              plan.has_checksums ? ", checksums" : "", plan.is_damaged ? ", damaged" : "",
              pending.grant ? ", grant" : "", plan.peer, what.c_str());
}

bool Soak::run() {
  const std::uint64_t warm = std::min(options_.num_transfers / 2, std::uint64_t{20'000});
  std::optional<Resources> before;
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t number = 0; number < options_.num_transfers; ++number) {
    Plan plan = make_plan(options_.seed, number, restart_every_, options_.without);
    act(number, plan);
    while (free_.empty()) {
      if (pending_.empty() || resting_.size() > kSlots / 2) {
        settle();
      } else {
        tend(number + kSlots, true);
        for (std::uint32_t index = 0; index < 2; ++index) resume(index);
        collect(true);
      }
    }
    submit(number, std::move(plan));
    tend(number, false);
    collect(false);
    if (number == warm) {
      settle();
      before = Resources::now();
    }
    if ((number + 1) % std::max<std::uint64_t>(options_.num_transfers / 10, 1) == 0) {
      std::printf("%lu transfers, %lu wrong\n", number + 1, num_wrong_);
      std::fflush(stdout);
    }
  }
  settle();
  const auto is_back = [&](const Resources& now) {
    return now.num_processes <= before->num_processes && now.num_fds <= before->num_fds + kLazyFds &&
           now.num_threads <= before->num_threads && now.num_segments <= before->num_segments &&
           (options_.has_sanitizer || now.rss_bytes <= before->rss_bytes + kSlackBytes);
  };
  Resources after = Resources::now();
  // UCX takes a while to close what a peer has left open
  for (int tries = 0; tries < 300 && !is_back(after); ++tries) {
    ::usleep(100'000);
    after = Resources::now();
  }
  const bool is_clean = is_back(after);
  if (!is_clean) ++num_wrong_;
  std::printf("%s: %s after %lu transfers, %s at the end\n", is_clean ? "nothing left behind" : "wrong",
              before->str().c_str(), warm, after.str().c_str());
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const auto& [code, count] : num_by_code_) std::printf("%s %lu, ", std::string(name_of(code)).c_str(), count);
  std::printf("%lu restarts, %lu verified, %.1f GiB, %.0f s\n%lu transfers, seed %lu, %s: %lu wrong\n", num_restarts_,
              num_verified_, static_cast<double>(num_bytes_) / (1 << 30), seconds, options_.num_transfers,
              options_.seed, options_.backend.c_str(), num_wrong_);
  return num_wrong_ == 0;
}

}  // namespace kvferry::soak
