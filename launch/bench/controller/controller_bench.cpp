#include "launch/bench/controller/controller_bench.h"

#include <fmt/format.h>

#include <cstdio>

#include "launch/bench/controller/controller_peers.h"
#include "launch/bench/controller/controller_steps.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/host_facts.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kHashesMin = 64 * kPrefixKeys;
constexpr std::uint64_t kRepeatMax = 100;

}  // namespace

Result<void> run_controller_bench(const ControllerFlags& flags) {
  FlagReader reader;
  const std::uint64_t num_hashes = reader.number("--hashes", flags.hashes, kHashesMin, kControllerHashesMax);
  const std::uint64_t repeat = reader.number("--repeat", flags.repeat, 1, kRepeatMax);
  reader.output_files(flags.json_file, flags.plot_file);
  const std::vector<std::string> peers = reader.peers(flags.peers, kControllerPeers);
  if (!reader.result()) return reader.result();
  const ControllerLoad load{num_hashes / kPrefixKeys * kPrefixKeys, repeat};
  ControllerReport report(kNumSteps);
  const Say say = [&](const std::string& line) { report.say(line); };
  // The server's process is forked first, before this process has a large memory of its own.
  if (Result<void> ok = measure_remote(load, report); !ok) return ok;
  if (Result<void> ok = measure_local(load, report); !ok) return ok;
  if (Result<void> ok = measure_events(load, report); !ok) return ok;
  if (Result<void> ok = measure_recovery(load, report); !ok) return ok;
  const Result<PeersFigures> others =
      measure_controller_peers(peers, load.num_hashes, load.repeat, controller_peer_program, say);
  if (!others) return others.error();
  fmt::print("\n{} hashes, {} workers, 1.5 placements a hash, batches of {}, median of {}\n{}{}", load.num_hashes,
             kNumWorkers, kBatchKeys, load.repeat, report.table(), controller_peers_table(*others, report.figures()));
  std::fflush(stdout);
  report.figures()["hashes"] = load.num_hashes;
  report.figures()["wrong_answers"] = 0;  // a wrong answer ends the run without figures
  report.figures()["machine"] = host_facts();
  if (!peers.empty()) {
    report.figures()["peers"] = others->peers;
    report.figures()["peers_missing"] = others->missing;
  }
  if (Result<void> ok = write_json(flags.json_file, report.figures()); !ok) return ok;
  return draw(flags.plot_file, peers.empty() ? "controller" : "controller_peers", report.figures(), say);
}

}  // namespace kvferry::bench
