#include "launch/bench/controller/controller_bench.h"

#include <fmt/format.h>

#include <cstdio>

#include "launch/bench/controller/controller_peers.h"
#include "launch/bench/controller/controller_steps.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/interrupt.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kHashesMin = 64 * kPrefixKeys;
constexpr std::uint64_t kRunsMax = 100;

void run(const ControllerFlags& flags, const ControllerLoad& load, const std::vector<std::string>& peers) {
  ControllerReport report(kNumSteps);
  const Say say = [&](const std::string& line) { report.say(line); };
  // measure_remote() forks the server's process, so it runs first, while this process has little memory.
  measure_remote(load, report);
  measure_local(load, report);
  measure_events(load, report);
  measure_recovery(load, report);
  const PeersFigures others =
      need(measure_controller_peers(peers, load.num_hashes, load.repeat, controller_peer_program, say));
  fmt::print("\n{} hashes, {} workers, 1.5 holders per hash, batches of {} hashes, median of {} runs\n{}{}",
             load.num_hashes, kNumWorkers, kBatchKeys, load.repeat, report.table(),
             controller_peers_table(others, report.figures()));
  std::fflush(stdout);
  report.figures()["hashes"] = load.num_hashes;
  report.figures()["wrong_answers"] = 0;  // a run with a wrong answer ends before this line, without figures
  report.figures()["machine"] = host_facts();
  if (!peers.empty()) {
    report.figures()["peers"] = others.peers;
    report.figures()["peers_missing"] = others.missing;
  }
  write_json(flags.json_file, report.figures());
  draw(flags.plot_file, peers.empty() ? "controller" : "controller_peers", report.figures(), say);
}

}  // namespace

Result<void> run_controller_bench(const ControllerFlags& flags) {
  FlagReader reader;
  const std::uint64_t num_hashes = reader.number("--hashes", flags.hashes, kHashesMin, kControllerHashesMax);
  const std::uint64_t repeat = reader.number("--repeat", flags.repeat, 1, kRunsMax);
  reader.output_files(flags.json_file, flags.plot_file);
  const std::vector<std::string> peers = reader.peers(flags.peers, kControllerPeers);
  if (!reader.result()) return reader.result();
  catch_interrupts();
  const ControllerLoad load{num_hashes / kPrefixKeys * kPrefixKeys, repeat};
  return attempt([&] { run(flags, load, peers); });
}

}  // namespace kvferry::bench
