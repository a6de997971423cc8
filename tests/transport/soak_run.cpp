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

constexpr std::uint64_t kSlackBytes = std::uint64_t{32} << 20;  // that memory may grow after the warm-up
// Of two links' three further TCP connections, both ends: a link that began anew before the warm-up's end may open them
// later than that, when a long transfer first wants them.
constexpr std::uint64_t kLazyFds = 2 * 3 * 2;
constexpr std::uint64_t kGuardBytes = 64;  // looked at behind a transfer's last byte

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
  for (auto& [id, flight] : flights_) {
    if (flight.peer == peer) flight.allowed.insert(code);
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

void Soak::prepare(Flight& flight) {
  const Plan& plan = flight.plan;
  const bool is_pull = plan.direction == Direction::kPull;
  const std::span<std::byte> here = local(flight.slot, plan.extent + kGuardBytes);
  const std::span<std::byte> there = remote(plan.peer, flight.slot, plan.extent + kGuardBytes);
  const std::span<std::byte> source = is_pull ? there : here;
  const std::span<std::byte> destination = is_pull ? here : there;
  if (plan.is_verified) {
    paint(source, plan.paint_seed);
    paint(destination, ~plan.paint_seed);
    flight.expected = copy_of(destination);
  }
  for (const CopyRange& range : plan.ranges) {
    const std::uint64_t from = is_pull ? range.remote_offset : range.local_offset;
    const std::uint64_t to = is_pull ? range.local_offset : range.remote_offset;
    if (plan.is_verified) std::memcpy(flight.expected.data() + to, source.data() + from, range.bytes);
    if (plan.has_checksums) flight.checksums.push_back(chunk_checksum(source.subspan(from, range.bytes)));
    num_bytes_ += range.bytes;
  }
  if (!plan.is_damaged) return;
  const std::size_t num_ranges = plan.ranges.size();
  std::size_t index = plan.paint_seed % num_ranges;
  while (plan.ranges[index].bytes == 0) index = (index + 1) % num_ranges;
  flight.damaged_range = static_cast<std::uint32_t>(index);
  flight.checksums[flight.damaged_range] ^= 1;
  flight.allowed = {ErrorCode::kCorrupt};
}

std::vector<CopyRange> Soak::part(const Flight& flight, std::uint32_t index) const {
  const std::size_t size = flight.plan.ranges.size();
  const std::size_t num_parts = flight.plan.num_feeds + 1;
  std::vector<CopyRange> ranges;
  for (std::size_t at = size * index / num_parts; at < size * (index + 1) / num_parts; ++at) {
    CopyRange range = flight.plan.ranges[at];
    range.local_offset += offset(flight.slot);
    if (!flight.grant) range.remote_offset += remote_offset(flight.slot);
    ranges.push_back(range);
  }
  return ranges;
}

std::vector<std::uint64_t> Soak::checksums_of(const Flight& flight, std::uint32_t index) const {
  if (!flight.plan.has_checksums) return {};
  const std::size_t size = flight.plan.ranges.size();
  const std::size_t num_parts = flight.plan.num_feeds + 1;
  const auto begin = flight.checksums.begin();
  return {begin + static_cast<std::ptrdiff_t>(size * index / num_parts),
          begin + static_cast<std::ptrdiff_t>(size * (index + 1) / num_parts)};
}

void Soak::submit(std::uint64_t number, Plan plan) {
  Flight flight;
  flight.number = number;
  flight.plan = std::move(plan);
  flight.slot = free_.front();
  const std::uint32_t peer = flight.plan.peer;
  flight.life = peers_[peer].life;
  flight.peer = peers_[peer].id;
  prepare(flight);
  if (flight.plan.is_granted) {
    resume(peer);
    flight.grant = peers_[peer].remote->grant(remote_offset(flight.slot), flight.plan.extent + 1);
  }
  PagedTransfer transfer;
  transfer.peer = flight.peer;
  transfer.direction = flight.plan.direction;
  transfer.local = local_region(flight.slot);
  transfer.remote_region = flight.grant ? flight.grant->exported : peers_[peer].remote->region();
  transfer.ranges = part(flight, flight.num_fed);
  transfer.checksums = checksums_of(flight, flight.num_fed++);
  transfer.notification = flight.plan.notification;
  transfer.priority = flight.plan.priority;
  transfer.is_fed = flight.plan.num_feeds > 0;
  if (flight.plan.is_bad) check_refusal(transfer);
  const Result<TransferId> id = transport_->submit(std::move(transfer));
  if (!id) return wrong(flight, "was not accepted: " + id.error().what);
  free_.pop_front();
  flights_.emplace(*id, std::move(flight));
}

void Soak::check_refusal(PagedTransfer transfer) {
  if (transfer.ranges.empty()) transfer.ranges.emplace_back();
  transfer.ranges.back().remote_offset = std::uint64_t{1} << 40;  // beyond whole huge pages, too
  transfer.ranges.back().bytes = 1;
  transfer.checksums.clear();
  const Result<TransferId> id = transport_->submit(std::move(transfer));
  if (!id && id.error().code == ErrorCode::kInvalidArgument) return;
  ++num_wrong_;
  std::printf("wrong: a range beyond the peer's region was accepted\n");
}

void Soak::feed(TransferId id, Flight& flight, bool is_all) {
  while (flight.num_fed <= flight.plan.num_feeds) {
    const bool is_last = flight.num_fed == flight.plan.num_feeds;
    const std::uint32_t index = flight.num_fed++;
    // What fails meanwhile may refuse to be fed; its Completion tells why.
    const Result<void> fed = transport_->feed(id, part(flight, index), checksums_of(flight, index), is_last);
    if (!fed && flight.allowed.size() == 1 && !flight.plan.is_damaged)
      wrong(flight, "was not fed: " + fed.error().what);
    if (!is_all) return;
  }
}

void Soak::tend(std::uint64_t number, bool hurries) {
  for (std::uint32_t index = 0; index < 2; ++index) {
    if (number >= peers_[index].stopped_until) resume(index);
  }
  const auto is_due = [&](const Flight& flight, int after) {
    return after >= 0 && number >= flight.number + static_cast<std::uint64_t>(after);
  };
  for (auto& [id, flight] : flights_) {
    if (number > flight.number) feed(id, flight, hurries);
    if (!flight.is_cancelled && is_due(flight, flight.plan.cancel_after)) {
      flight.is_cancelled = true;
      flight.allowed.insert(ErrorCode::kCancelled);
      transport_->cancel(id);
    }
    if (flight.grant && !flight.is_revoked && is_due(flight, flight.plan.revoke_after)) revoke_early(flight);
  }
}

void Soak::revoke_early(Flight& flight) {
  Peer& peer = peers_[flight.plan.peer];
  if (peer.life != flight.life) return;  // died with its grants
  resume(flight.plan.peer);
  flight.allowed.insert(ErrorCode::kRefused);
  const ErrorCode code = peer.remote->revoke(flight.grant->id);
  if (code == ErrorCode::kFull) return;
  if (code != ErrorCode::kOk) wrong(flight, "has a grant that cannot be revoked");
  flight.is_revoked = true;
  if (options_.backend != "ucx_one_sided")
    flight.at_revoke = copy_of(remote(flight.plan.peer, flight.slot, flight.plan.extent));
}

void Soak::collect(bool waits) {
  if (waits) {
    int num_silent = 0;
    while (!transport_->wait(kSecond)) {
      if (++num_silent < 60) continue;
      for (const auto& [id, flight] : flights_) wrong(flight, "never completed");
      std::exit(1);
    }
  }
  for (const Completion& completion : transport_->poll()) finish(completion);
}

void Soak::finish(const Completion& completion) {
  const auto found = flights_.find(completion.id);
  if (found == flights_.end()) {
    ++num_wrong_;
    std::printf("wrong: transfer id %lu completed twice or was never submitted\n", completion.id.value);
    return;
  }
  Flight flight = std::move(found->second);
  flights_.erase(found);
  ++num_by_code_[completion.code];
  if (!flight.allowed.contains(completion.code))
    wrong(flight, fmt::format("ended with {}: {}", name_of(completion.code), completion.what));
  check_bytes(flight, completion);
  give_back(flight);
  if (completion.code == ErrorCode::kOk) {
    if (!flight.plan.notification.empty()) await_notification(flight);
    free_.push_back(flight.slot);
  } else {
    Resting resting{flight.slot, flight.number, {}};
    if (flight.plan.direction == Direction::kPull) resting.local = copy_of(local(flight.slot, flight.plan.extent));
    resting_.push_back(std::move(resting));
  }
}

void Soak::check_bytes(const Flight& flight, const Completion& completion) {
  const bool is_pull = flight.plan.direction == Direction::kPull;
  const bool is_alive = peers_[flight.plan.peer].life == flight.life;
  if (!is_pull && !is_alive) return;  // the memory went with the process
  if (completion.code == ErrorCode::kOk && flight.plan.is_verified) {
    ++num_verified_;
    const std::uint64_t bytes = flight.expected.size();
    const std::span<std::byte> got = is_pull ? local(flight.slot, bytes) : remote(flight.plan.peer, flight.slot, bytes);
    if (!are_equal(got, flight.expected)) wrong(flight, is_pull ? "pulled wrong bytes" : "pushed wrong bytes");
  }
  if (completion.code == ErrorCode::kCorrupt && completion.corrupt_ranges != std::vector{flight.damaged_range})
    wrong(flight, fmt::format("names other corrupt ranges than {}", flight.damaged_range));
  if (!is_pull && !flight.at_revoke.empty() &&
      !are_equal(remote(flight.plan.peer, flight.slot, flight.plan.extent), flight.at_revoke))
    wrong(flight, "wrote to a grant that had been taken back");
}

void Soak::give_back(Flight& flight) {
  Peer& peer = peers_[flight.plan.peer];
  if (!flight.grant || flight.is_revoked || peer.life != flight.life) return;
  resume(flight.plan.peer);
  // A peer may be a moment behind with its books, or still be told that the connection is over.
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  ErrorCode code = peer.remote->revoke(flight.grant->id);
  while (code == ErrorCode::kFull && std::chrono::steady_clock::now() < deadline)
    code = peer.remote->revoke(flight.grant->id);
  if (code != ErrorCode::kOk) wrong(flight, fmt::format("left a grant behind: {}", name_of(code)));
}

void Soak::await_notification(const Flight& flight) {
  if (peers_[flight.plan.peer].life != flight.life) return;
  resume(flight.plan.peer);
  for (bool has_more = true; has_more && !notified_[flight.number];) read_notification(flight.plan.peer, has_more);
  if (!notified_[flight.number]) wrong(flight, "completed, but its notification did not arrive");
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

/// Everything completes; then every slot is free again and every lost peer given up.
void Soak::settle() {
  for (std::uint32_t index = 0; index < 2; ++index) resume(index);
  while (!flights_.empty()) {
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

void Soak::wrong(const Flight& flight, const std::string& what) {
  ++num_wrong_;
  const Plan& plan = flight.plan;
  std::printf("wrong: transfer %lu (%s, %zu ranges, %u feeds%s%s%s, peer %u) %s\n", flight.number,
              plan.direction == Direction::kPull ? "pull" : "push", plan.ranges.size(), plan.num_feeds,
              plan.has_checksums ? ", checksums" : "", plan.is_damaged ? ", damaged" : "",
              flight.grant ? ", grant" : "", plan.peer, what.c_str());
}

bool Soak::run() {
  const std::uint64_t warm = std::min(options_.num_transfers / 2, std::uint64_t{20'000});
  std::optional<Resources> before;
  const auto start = std::chrono::steady_clock::now();
  for (std::uint64_t number = 0; number < options_.num_transfers; ++number) {
    Plan plan = make_plan(options_.seed, number, restart_every_, options_.without);
    act(number, plan);
    while (free_.empty()) {
      if (flights_.empty() || resting_.size() > kSlots / 2) {
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
  for (int tries = 0; tries < 300 && !is_back(after); ++tries) {  // UCX takes its time to close what a peer has left
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
