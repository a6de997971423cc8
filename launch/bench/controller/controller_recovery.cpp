#include <poll.h>

#include <algorithm>
#include <string>
#include <vector>

#include "controller/client/publisher.h"
#include "controller/directory/sessions.h"
#include "controller/protocol/wire.h"
#include "controller/state/state_journal.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/controller/controller_steps.h"
#include "launch/bench/harness/programs.h"

namespace kvferry::bench {
namespace {

namespace wire = controller::wire;
using controller::ChunkEntry;
using controller::Directory;
using controller::NodeId;
using controller::StateJournal;

constexpr std::uint64_t kBatchesPerWrite = 64;  // number of published batches between two writes of the log
constexpr std::uint64_t kChurnedPrefixes = 10'000;
constexpr TimeNs kRecoveryPatience = 60 * kSecond;

double seconds(TimeNs took) { return static_cast<double>(took) * 1e-9; }

controller::DirectoryOptions directory_options() {
  return {.lease_ms = 1'000'000,
          .chunks_per_node_max = std::size_t{1} << 40,
          .chunks_max = std::size_t{1} << 40,
          .index = {.seed = 1}};
}

struct StateFigures {
  double worst_lookup_us = 0;  // slowest lookup during a snapshot; includes the journal's work right before that lookup
  double snapshot_s = 0;
  double bytes = 0;
};

/// Writes a state folder like that of a killed controller, and measures lookups while a snapshot is made.
StateFigures make_state(const std::string& folder, std::uint64_t num_prefixes) {
  const SteadyClock clock;
  Directory directory(directory_options());
  const std::unique_ptr<StateJournal> journal = need(StateJournal::open({.folder = folder}, directory, clock));
  DirectoryWorkers workers(directory, clock.now());
  std::vector<ChunkEntry> chunks(kBatchKeys);
  std::uint64_t num_batches = 0;
  for_each_batch(0, num_prefixes, [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
    fill_chunks(prefix, position, chunks);
    workers.publish(worker, chunks, clock.now());
    if (++num_batches % kBatchesPerWrite == 0) journal->serve(clock.now());
  });
  const NodeId asker = directory.join(worker_info(kNumWorkers), 0, clock.now()).value().id;
  std::uint64_t prefix = 0;
  while (journal->is_making_snapshot()) journal->serve(clock.now());
  journal->want_snapshot();
  const TimeNs begun = clock.now();
  TimeNs worst = 0;
  do {
    prefix = scramble(prefix + 1) % num_prefixes;
    const controller::LookupQuery query = query_of(prefix);
    const TimeNs asked = clock.now();
    journal->serve(asked);
    directory.expire(asked);
    const auto holders = directory.lookup(asker, query, asked);
    worst = std::max(worst, clock.now() - asked);
    if (!holders || !names_all_workers(*holders, prefix)) throw wrong_answer();
  } while (journal->is_making_snapshot());
  StateFigures figures{.worst_lookup_us = static_cast<double>(worst) * 1e-3,
                       .snapshot_s = seconds(clock.now() - begun)};
  // A long log is the worst case for recovery. Publishing and evicting make the log almost as long as it can be before
  // the journal makes a new snapshot.
  const std::uint64_t log_bytes_max = std::max<std::uint64_t>(controller::StateOptions{}.log_bytes_min,
                                                              journal->status(clock.now()).snapshot_bytes / 2);
  std::vector<ChunkKey> keys(kBatchKeys);
  for (std::uint64_t i = 0; journal->status(clock.now()).log_bytes < log_bytes_max / 20 * 19; ++i) {
    const auto worker = static_cast<std::uint32_t>(i % kNumWorkers);
    fill_chunks(num_prefixes + i % kChurnedPrefixes, 0, chunks);
    for (std::size_t chunk = 0; chunk < chunks.size(); ++chunk) keys[chunk] = chunks[chunk].key;
    workers.publish(worker, chunks, clock.now());
    workers.evict(worker, keys, clock.now());
    if (i % kBatchesPerWrite != 0) continue;
    journal->flush();
    journal->drain();
  }
  journal->drain();
  const controller::StateStatus state = journal->status(clock.now());
  figures.bytes = static_cast<double>(state.log_bytes + state.snapshot_bytes);
  return figures;
}

/// Starts a controller with the state that make_state() wrote. Returns the seconds until the controller's first right
/// answer.
double recover(const std::string& folder, std::uint64_t num_prefixes) {
  const SteadyClock clock;
  const TimeNs begun = clock.now();
  const std::string endpoint = fmt::format("ipc://{}/socket", folder);
  ChildProcess process({{kvferry_program(), "controller", "--bind", endpoint, "--state", folder + "/state"},
                        {"KVFERRY_LOG=warn", "KVFERRY_CLUSTER_KEY_FILE="}});
  const Result<nlohmann::json> line = process.link().receive(kRecoveryPatience);
  const bool is_told =
      line ||
      line.error().code == ErrorCode::kCorrupt;  // the controller's first line names its endpoint and is not JSON
  if (!is_told)
    throw Failure(
        {ErrorCode::kUnavailable,
         fmt::format("a controller did not start with the state of a killed controller; the last line of its stderr: "
                     "'{}'",
                     process.last_words())});
  const std::unique_ptr<controller::Client> client =
      need(controller::make_client({.controller = endpoint, .node = worker_info(kNumWorkers + 1)}));
  need(wait_registered(*client, clock, kRecoveryPatience / kMillisecond));
  const std::uint64_t prefix = num_prefixes - 1;
  need(client->lookup(query_of(prefix)));
  while (clock.now() - begun < kRecoveryPatience) {
    for (const controller::ClientEvent& event : client->process(clock.now())) {
      const auto* reply = std::get_if<controller::LookupReply>(&event);
      if (reply == nullptr) continue;
      if (!names_all_workers(reply->holders, prefix)) throw wrong_answer();
      return seconds(clock.now() - begun);
    }
    pollfd item{client->fd(), POLLIN, 0};
    ::poll(&item, 1, 10);
  }
  throw Failure(
      {ErrorCode::kUnavailable,
       fmt::format("a controller that was started with the state of a killed controller did not answer a lookup "
                   "within {} s",
                   kRecoveryPatience / kSecond)});
}

/// Passes the snapshots of all workers to the empty directory of a controller in this process, one message of each
/// worker in turn. Returns the time in seconds.
double resync(std::uint64_t num_prefixes) {
  class NoReplies final : public controller::ReplySender {
   public:
    bool send(controller::ConnectionId, std::string_view) override { return true; }
  } no_replies;
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
    connections.push_back(sessions.open());
    sessions.receive(connections.back(), encode(wire::Hello{.node = worker_info(worker)}), clock.now(), no_replies);
  }
  for (std::size_t i = 0, num_taken = 1; num_taken > 0; ++i) {
    num_taken = 0;
    for (std::uint32_t worker = 0; worker < kNumWorkers; ++worker) {
      if (i >= messages[worker].size()) continue;
      sessions.receive(connections[worker], messages[worker][i], clock.now(), no_replies);
      sessions.expire(clock.now());
      ++num_taken;
    }
  }
  const double took_s = seconds(clock.now() - begun);
  Directory& directory = sessions.directory();
  const NodeId asker = directory.join(worker_info(kNumWorkers), 0, clock.now()).value().id;
  for (std::uint64_t prefix = 0; prefix < num_prefixes; prefix += 97) {
    const auto holders = directory.lookup(asker, query_of(prefix), clock.now());
    if (!holders || !names_all_workers(*holders, prefix)) throw wrong_answer();
  }
  return took_s;
}

}  // namespace

void measure_recovery(const ControllerLoad& load, ControllerReport& report) {
  const TemporaryFolder folder;
  report.group("state");
  report.begin("recovery of a killed controller");
  const StateFigures state = make_state(folder.path() + "/state", load.num_prefixes());
  const double recovery_s = recover(folder.path(), load.num_prefixes());
  const double resync_s = resync(load.num_prefixes());
  report.row("recovery", fmt::format("{:>9.2f} s with a killed controller's state, {:.2f} s without state, from "
                                     "snapshots of all workers",
                                     recovery_s, resync_s));
  report.note("worst lookup while a snapshot is made",
              fmt::format("{:>9.1f} us   (the snapshot took {:.2f} s)", state.worst_lookup_us, state.snapshot_s));
  report.note("on disk", fmt::format("{:>9.1f} MB", state.bytes * 1e-6));
  report.figure("recovery_s", recovery_s);
  report.figure("cold_resync_s", resync_s);
  report.figure("worst_lookup_us_while_snapshot", state.worst_lookup_us);
  report.figure("snapshot_s", state.snapshot_s);
  report.figure("state_bytes", state.bytes);
}

}  // namespace kvferry::bench
