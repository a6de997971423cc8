#include "launch/bench/controller/controller_recovery.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "controller/client/publisher.h"
#include "controller/directory/sessions.h"
#include "controller/state/state_journal.h"
#include "controller/protocol/wire.h"
#include "launch/bench/harness/child_process.h"
#include "launch/bench/controller/controller_load.h"
#include "launch/bench/transfer/programs.h"

namespace kvferry::bench {
namespace {

struct RecoveryFigures {
  double recovery_s = 0;     // from the start of a new process on the killed one's state to its first right answer
  double cold_resync_s = 0;  // all workers' snapshots, as from the wire, into an empty controller
  double worst_lookup_us_while_snapshot = 0;  // a look-up waits for what else the thread does in its turn
  double snapshot_s = 0;
  double state_bytes = 0;
};

namespace wire = controller::wire;
using controller::ChunkEntry;
using controller::Directory;
using controller::NodeId;
using controller::StateJournal;

constexpr std::uint64_t kLookupKeys = 128;
constexpr std::uint64_t kBatchesPerTurn = 64;  // as the server takes in some messages before it hands over the log
constexpr std::uint64_t kChurnedPrefixes = 10'000;
constexpr TimeNs kPatience = 60 * kSecond;

struct TemporaryFolder {
  TemporaryFolder() : path(std::filesystem::temp_directory_path() / fmt::format("kvferry-bench-{}", ::getpid())) {
    std::filesystem::create_directories(path);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
  std::filesystem::path path;
};

double seconds(TimeNs took) { return static_cast<double>(took) * 1e-9; }

controller::NodeInfo info_of(std::uint32_t worker) {
  return {EngineId{fmt::format("worker{}", worker)}, Incarnation{1}, "kv_both", "tcp://10.0.0.1:1", "", "model"};
}

controller::DirectoryOptions directory_options() {
  return {.lease_ms = 1'000'000,
          .chunks_per_node_max = std::size_t{1} << 40,
          .chunks_max = std::size_t{1} << 40,
          .index = {.seed = 1}};
}

void fill_chunks(std::uint64_t prefix, std::uint64_t position, std::vector<ChunkEntry>& chunks) {
  std::vector<ChunkKey> keys(chunks.size());
  fill_keys<ChunkKey>(prefix, position, keys);
  for (std::size_t i = 0; i < keys.size(); ++i) chunks[i].key = keys[i];
}

controller::LookupQuery query_of(std::uint64_t prefix) {
  controller::LookupQuery query{.keys = std::vector<ChunkKey>(kLookupKeys), .tail_groups = {}, .exact_tails = {}};
  fill_keys<ChunkKey>(prefix, 0, query.keys);
  return query;
}

bool is_right(const std::vector<controller::Holder>& holders, std::uint64_t prefix) {
  return holders.size() == (has_second_worker(prefix) ? 2U : 1U) && holders.back().num_full_chunks == kLookupKeys;
}

const Error kWrong{ErrorCode::kCorrupt, "a look-up answered wrongly; no figure is worth anything"};

/// Leaves a state folder behind as a controller does that is killed at any moment, and looks up while it snapshots.
Result<void> make_state(const std::string& folder, std::uint64_t num_prefixes, RecoveryFigures& figures) {
  const SteadyClock clock;
  Directory directory(directory_options());
  Result<std::unique_ptr<StateJournal>> journal = StateJournal::open({.folder = folder}, directory, clock);
  if (!journal) return std::move(journal).error();
  std::vector<NodeId> nodes;
  for (std::uint32_t i = 0; i < kNumWorkers; ++i) {
    nodes.push_back(directory.join(info_of(i), 0, clock.now()).value().id);
    directory.publish(nodes[i], 0, controller::SnapshotMark::kReplaces, {}, clock.now());
  }
  std::vector<ChunkEntry> chunks(kBatchKeys);
  std::uint64_t num_batches = 0;
  for_each_batch(0, num_prefixes, [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
    fill_chunks(prefix, position, chunks);
    const NodeId node = nodes[worker];
    directory.publish(node, directory.repair(node).resend_from, controller::SnapshotMark::kNone, chunks, clock.now());
    if (++num_batches % kBatchesPerTurn == 0) (*journal)->take(clock.now());
  });
  const NodeId asker = directory.join(info_of(kNumWorkers), 0, clock.now()).value().id;
  std::uint64_t prefix = 0;
  while ((*journal)->is_making_snapshot()) (*journal)->take(clock.now());
  (*journal)->want_snapshot();
  const TimeNs begun = clock.now();
  TimeNs worst = 0;
  do {
    prefix = scramble(prefix + 1) % num_prefixes;
    const controller::LookupQuery query = query_of(prefix);
    const TimeNs asked = clock.now();
    (*journal)->take(asked);
    directory.expire(asked);
    const auto holders = directory.lookup(asker, query, asked);
    worst = std::max(worst, clock.now() - asked);
    if (!holders || !is_right(*holders, prefix)) return kWrong;
  } while ((*journal)->is_making_snapshot());
  figures.snapshot_s = seconds(clock.now() - begun);
  figures.worst_lookup_us_while_snapshot = static_cast<double>(worst) * 1e-3;
  // The worst moment to be killed at: the log is as long as it gets.
  const std::uint64_t log_bytes_max = std::max<std::uint64_t>(controller::StateOptions{}.log_bytes_min,
                                                              (*journal)->status(clock.now()).snapshot_bytes / 2);
  std::vector<ChunkKey> keys(kBatchKeys);
  for (std::uint64_t i = 0; (*journal)->status(clock.now()).log_bytes < log_bytes_max / 20 * 19; ++i) {
    const NodeId node = nodes[i % kNumWorkers];
    fill_chunks(num_prefixes + i % kChurnedPrefixes, 0, chunks);
    for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) keys[chunk] = chunks[chunk].key;
    directory.publish(node, directory.repair(node).resend_from, controller::SnapshotMark::kNone, chunks, clock.now());
    directory.evict(node, directory.repair(node).resend_from, keys, clock.now());
    if (i % kBatchesPerTurn != 0) continue;
    (*journal)->flush();
    (*journal)->drain();
  }
  (*journal)->drain();
  const controller::StateStatus state = (*journal)->status(clock.now());
  figures.state_bytes = static_cast<double>(state.log_bytes + state.snapshot_bytes);
  return {};
}

/// A new process on that state, and a client that asks it as soon as it listens.
Result<void> recover(const TemporaryFolder& folder, std::uint64_t num_prefixes, RecoveryFigures& figures) {
  const SteadyClock clock;
  const TimeNs begun = clock.now();
  const Result<std::string> program = kvferry_program();
  if (!program) return program.error();
  Result<ChildProcess> process =
      ChildProcess::start({{*program, "controller", "--bind", fmt::format("ipc://{}/socket", folder.path.string()),
                            "--state", folder.path / "state"},
                           {"KVFERRY_LOG=warn"}});
  if (!process) return std::move(process).error();
  const Result<nlohmann::json> line = process->link().receive(kPatience);
  const bool is_told = line || line.error().code == ErrorCode::kCorrupt;  // where it listens, which is no JSON
  if (!is_told) return Error{ErrorCode::kUnavailable, process->last_words()};
  Result<std::unique_ptr<controller::Client>> client = controller::make_client(
      {.controller = fmt::format("ipc://{}/socket", folder.path.string()), .node = info_of(kNumWorkers + 1)});
  if (!client) return std::move(client).error();
  if (Result<void> registered = wait_registered(**client, clock, kPatience / kMillisecond); !registered)
    return registered;
  const std::uint64_t prefix = num_prefixes - 1;
  if (Result<std::uint64_t> asked = (*client)->lookup(query_of(prefix)); !asked) return std::move(asked).error();
  while (clock.now() - begun < kPatience) {
    for (const controller::ClientEvent& event : (*client)->process(clock.now())) {
      const auto* reply = std::get_if<controller::LookupReply>(&event);
      if (reply == nullptr) continue;
      if (!is_right(reply->holders, prefix)) return kWrong;
      figures.recovery_s = seconds(clock.now() - begun);
      return {};
    }
    pollfd item{(*client)->fd(), POLLIN, 0};
    ::poll(&item, 1, 10);
  }
  return Error{ErrorCode::kUnavailable, "a controller on a killed one's state did not answer"};
}

/// What 64 workers send after SnapshotWanted, message by message in turns, taken in as from the wire.
Result<void> resync(std::uint64_t num_prefixes, RecoveryFigures& figures) {
  class Nowhere final : public controller::ReplySender {
   public:
    bool send(controller::ConnectionId, std::string_view) override { return true; }
  } nowhere;
  std::vector<std::vector<std::string>> messages(kNumWorkers);
  for (std::uint32_t worker = 0; worker < kNumWorkers; ++worker) {
    controller::Publisher publisher(Incarnation{1}, 0,
                                    [&](std::string_view bytes) { messages[worker].emplace_back(bytes); });
    publisher.begin_snapshot();
    std::vector<ChunkEntry> held, chunks(kPrefixKeys);
    for (std::uint64_t prefix = 0; prefix < num_prefixes; ++prefix) {
      const bool holds =
          first_worker(prefix) == worker || (has_second_worker(prefix) && second_worker(prefix) == worker);
      if (!holds) continue;
      fill_chunks(prefix, 0, chunks);
      held.insert(held.end(), chunks.begin(), chunks.end());
    }
    publisher.publish(held);
    publisher.end_snapshot();
  }
  const SteadyClock clock;
  controller::Sessions sessions(directory_options(), clock.now());
  const TimeNs begun = clock.now();
  std::vector<controller::ConnectionId> connections;
  for (std::uint32_t worker = 0; worker < kNumWorkers; ++worker) {
    const controller::NodeInfo info = info_of(worker);
    connections.push_back(sessions.open());
    sessions.take(connections.back(),
                  encode(wire::Hello{.engine_id = info.engine_id.value,
                                     .incarnation = 1,
                                     .role = info.role,
                                     .endpoint = info.endpoint,
                                     .fingerprint = info.fingerprint}),
                  clock.now(), nowhere);
  }
  for (std::size_t i = 0, num_taken = 1; num_taken > 0; ++i) {
    num_taken = 0;
    for (std::uint32_t worker = 0; worker < kNumWorkers; ++worker) {
      if (i >= messages[worker].size()) continue;
      sessions.take(connections[worker], messages[worker][i], clock.now(), nowhere);
      sessions.expire(clock.now());
      ++num_taken;
    }
  }
  figures.cold_resync_s = seconds(clock.now() - begun);
  Directory& directory = sessions.directory();
  const NodeId asker = directory.join(info_of(kNumWorkers), 0, clock.now()).value().id;
  for (std::uint64_t prefix = 0; prefix < num_prefixes; prefix += 97) {
    const auto holders = directory.lookup(asker, query_of(prefix), clock.now());
    if (!holders || !is_right(*holders, prefix)) return kWrong;
  }
  return {};
}

}  // namespace

Result<void> measure_recovery(const ControllerLoad& load, ControllerReport& report) {
  const std::uint64_t num_prefixes = load.num_hashes / kPrefixKeys;
  RecoveryFigures figures;
  const TemporaryFolder folder;
  report.group("state");
  report.begin("recovery");
  if (Result<void> made = make_state(folder.path / "state", num_prefixes, figures); !made) return made;
  if (Result<void> recovered = recover(folder, num_prefixes, figures); !recovered) return recovered;
  if (Result<void> synced = resync(num_prefixes, figures); !synced) return synced;
  report.row("recovery", fmt::format("{:>9.2f} s from a killed one's state, {:.2f} s from all workers, without state",
                                     figures.recovery_s, figures.cold_resync_s));
  report.note(
      "worst look-up while a snapshot is made",
      fmt::format("{:>9.1f} us   ({:.2f} s for it)", figures.worst_lookup_us_while_snapshot, figures.snapshot_s));
  report.note("on disk", fmt::format("{:>9.1f} MB", figures.state_bytes * 1e-6));
  report.figures()["recovery_s"] = figures.recovery_s;
  report.figures()["cold_resync_s"] = figures.cold_resync_s;
  report.figures()["worst_lookup_us_while_snapshot"] = figures.worst_lookup_us_while_snapshot;
  report.figures()["snapshot_s"] = figures.snapshot_s;
  report.figures()["state_bytes"] = figures.state_bytes;
  return {};
}

}  // namespace kvferry::bench
