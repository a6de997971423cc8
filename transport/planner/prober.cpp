#include "transport/planner/prober.h"

#include <algorithm>
#include <utility>

#include "transport/base/clock.h"
#include "transport/planner/backends.h"

namespace kvferry::planner {
namespace {

constexpr std::uint64_t kBlockBytes = 64 << 10;  // typical block size of paged caches
constexpr int kRounds = 3;                       // the first round also connects and warms up
// Time limit for all rounds with one path and one class of memory. On a path with a PathInfo::setup_ns, the first round
// may take that much longer, and the limit begins anew after that round. A path of less than about 3 MB/s counts as
// failed: it comes last in the order, and path_between() does not return it for GPU memory.
constexpr TimeNs kPatience = kSecond;

std::string text_of(const std::vector<Measured>& measured) {
  std::string text;
  for (const Measured& one : measured) {
    text += text.empty() ? "" : ", ";
    text += one.gb_per_s > 0 ? fmt::format("{} {:.1f} GB/s", name_of(one.path), one.gb_per_s)
                             : fmt::format("no {} ({})", name_of(one.path), one.problem);
  }
  return text;
}

}  // namespace

std::string Measurements::describe() const {
  std::string text;
  for (const auto& [kind, memory] : {std::pair{MemoryClass::kShared, "pools"},
                                     {MemoryClass::kOther, "other memory"},
                                     {MemoryClass::kDevice, "GPU memory"}}) {
    if (of(kind).empty()) continue;
    text += fmt::format("{}{} by {}", text.empty() ? "" : "; ", memory, text_of(of(kind)));
  }
  return text.empty() ? "not measured yet" : text;
}

double Measurements::rate_of(std::string_view backend) const {
  double rate = 0;
  for (const std::vector<Measured>& measured : by_class)
    for (const Measured& one : measured)
      if (info_of(one.path).backend == backend) rate = std::max(rate, one.gb_per_s * 1e9);
  return rate;
}

Prober::~Prober() {
  {
    const std::lock_guard lock(mutex_);
    is_stopping_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Prober::probe(Address address, std::vector<std::string> backends, Done done) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back({std::move(address), std::move(backends), std::move(done)});
  if (!thread_.joinable()) thread_ = std::thread(&Prober::thread_main, this);
  wake_.notify_all();
}

void Prober::thread_main() {
  while (true) {
    Job job;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return is_stopping_ || !jobs_.empty(); });
      if (is_stopping_) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    const Measurements found = measure(job);
    if (!is_stopping_) job.done(found);
  }
}

Measurements Prober::measure(const Job& job) const {
  Measurements found;
  for (const PathInfo& info : all_paths()) {
    if (std::find(job.backends.begin(), job.backends.end(), info.backend) == job.backends.end()) continue;
    if (options_.path != Path::kAuto && options_.path != info.path) continue;
    for (const RegionParts& probe : job.address.probes) {
      const MemoryClass kind = probe.memory_class();
      if (!info.reaches_class(kind) || (kind == MemoryClass::kDevice && options_.device == nullptr)) continue;
      const std::string* address = find_part(job.address.parts, info.backend);
      const std::string* region = find_part(probe.parts, info.backend);
      // The path is left out if the peer does not have this backend, or has not registered this memory with it.
      if (address == nullptr || region == nullptr) continue;
      const Result<double> speed = pull(info.path, *address, *region, kind == MemoryClass::kDevice);
      found.of(kind).push_back(speed ? Measured{info.path, *speed, ""} : Measured{info.path, 0, speed.error().what});
    }
  }
  if (options_.path == Path::kCma) found.of(MemoryClass::kShared) = found.of(MemoryClass::kOther);
  for (std::vector<Measured>& list : found.by_class)
    std::stable_sort(list.begin(), list.end(),
                     [](const Measured& a, const Measured& b) { return a.gb_per_s > b.gb_per_s; });
  return found;
}

Result<double> Prober::pull(Path path, const std::string& address, const std::string& region, bool is_device) const {
  if (!is_device) {
    std::vector<std::byte> memory(kProbeBytes);  // outlives the backends, which may still be copying after a timeout
    return pull(path, address, region, MemoryRegion{memory.data(), memory.size()});
  }
  std::byte* const memory = KVFERRY_TRY(options_.device->allocate(MemoryKind::kDevice, kProbeBytes));
  MemoryRegion into{memory, kProbeBytes};
  into.device = options_.device;
  Result<double> speed = pull(path, address, region, into);
  options_.device->release(MemoryKind::kDevice, memory);
  return speed;
}

Result<double> Prober::pull(Path path, const std::string& address, const std::string& region,
                            const MemoryRegion& into) const {
  TransportOptions options = options_;
  options.path = path;
  options.tcp.listen_ports = {};  // any free port: the configured ports are for the transport that peers connect to
  Backends backends = KVFERRY_TRY(make_backends(options));
  Transport& transport = *backends.front().transport;
  const RegionId local = KVFERRY_TRY(transport.register_region(into));
  const PeerId peer = KVFERRY_TRY(transport.connect(address));
  const SteadyClock clock;
  TimeNs deadline = clock.now() + kPatience + info_of(path).setup_ns;
  TimeNs best_ns = kPatience;
  for (int round = 0; round < kRounds; ++round) {
    PagedTransfer transfer{peer, Direction::kPull, local, region, {}, ""};
    // The even blocks come before the odd ones, so that no neighbours are joined, as in a paged cache.
    for (const std::uint64_t first : {std::uint64_t{0}, kBlockBytes}) {
      for (std::uint64_t at = first; at < kProbeBytes; at += 2 * kBlockBytes)
        transfer.ranges.push_back({at, at, kBlockBytes});
    }
    const TimeNs began_at = clock.now();
    if (const Result<TransferId> id = transport.submit(std::move(transfer)); !id)
      return Error{id.error().code, id.error().what};
    std::vector<Completion> completions;
    while (completions.empty()) {
      if (is_stopping_ || clock.now() >= deadline)
        return Error{ErrorCode::kTimeout, "too slow to measure: less than about 3 MB/s, or no connection in time"};
      transport.wait(20 * kMillisecond);
      completions = transport.poll();
    }
    if (completions[0].code != ErrorCode::kOk) return Error{completions[0].code, completions[0].what};
    best_ns = std::min(best_ns, clock.now() - began_at);
    if (round == 0 && info_of(path).setup_ns > 0) deadline = clock.now() + kPatience;
  }
  return static_cast<double>(kProbeBytes) / static_cast<double>(best_ns);  // bytes per ns are GB/s
}

}  // namespace kvferry::planner
