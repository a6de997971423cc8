#include "launch/bench/controller/controller_bench.h"

#include <fmt/format.h>

#include <cstdio>

#include "launch/bench/controller/controller_events.h"
#include "launch/bench/controller/controller_local.h"
#include "launch/bench/controller/controller_peers.h"
#include "launch/bench/controller/controller_recovery.h"
#include "launch/bench/controller/controller_remote.h"
#include "launch/bench/controller/controller_report.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/host_facts.h"
#include "launch/bench/transfer/options.h"

namespace kvferry::bench {
namespace {

constexpr std::uint64_t kHashesMin = 64 * kPrefixKeys;
constexpr std::uint64_t kRepeatMax = 100;

constexpr std::size_t kEventSteps = 1;

Result<void> measure_events(const ControllerLoad& load, ControllerReport& report) {
  report.group("engines' events");
  report.begin("vLLM's");
  const Result<EngineEventRates> rates = measure_engine_events(load.num_hashes, load.repeat);
  if (!rates) return rates.error();
  report.row("vLLM's", fmt::format("{:>9.1f} M hashes/s decoded and indexed, {:.1f} M decoded alone",
                                   rates->stored * 1e-6, rates->decoded * 1e-6));
  report.note("vLLM's, hashes of 32 bytes", fmt::format("{:>9.1f} M hashes/s", rates->stored_bytes * 1e-6));
  report.note("vLLM's, removals", fmt::format("{:>9.1f} M hashes/s", rates->removed * 1e-6));
  report.note("memory, by hash and by tokens", fmt::format("{:>9.1f} bytes a hash", rates->bytes_per_hash));
  report.figures()["vllm_event_hashes_per_s"] = rates->stored;
  report.figures()["vllm_event_hashes_per_s_bytes"] = rates->stored_bytes;
  report.figures()["vllm_event_removals_per_s"] = rates->removed;
  report.figures()["vllm_event_decoded_per_s"] = rates->decoded;
  report.figures()["bytes_per_engine_hash"] = rates->bytes_per_hash;
  return {};
}

}  // namespace

Result<void> run_controller_bench(const ControllerFlags& flags) {
  const Result<std::uint64_t> hashes = parse_number("--hashes", flags.hashes, kHashesMin, kControllerHashesMax);
  if (!hashes) return hashes.error();
  const Result<std::uint64_t> repeat = parse_number("--repeat", flags.repeat, 1, kRepeatMax);
  if (!repeat) return repeat.error();
  if (Result<void> ok = check_file("--json", flags.json_file, ""); !ok) return ok;
  if (Result<void> ok = check_file("--plot", flags.plot_file, ".png"); !ok) return ok;
  const Result<std::vector<std::string>> peers = parse_controller_peers(flags.peers);
  if (!peers) return peers.error();
  const ControllerLoad load{*hashes / kPrefixKeys * kPrefixKeys, *repeat};
  ControllerReport report(kLocalSteps + kRemoteSteps + kEventSteps + kRecoverySteps);
  // The server is another process: it starts before this one has memory of its own to share.
  if (Result<void> ok = measure_remote(load, report); !ok) return ok;
  if (Result<void> ok = measure_local(load, report); !ok) return ok;
  if (Result<void> ok = measure_events(load, report); !ok) return ok;
  if (Result<void> ok = measure_recovery(load, report); !ok) return ok;
  const Result<PeersFigures> others =
      measure_controller_peers(*peers, load.num_hashes, load.repeat, controller_peer_program,
                               [&](const std::string& line) { report.say(line); });
  if (!others) return others.error();
  fmt::print("\n{} hashes, {} workers, 1.5 placements a hash, batches of {}, median of {}\n{}{}", load.num_hashes,
             kNumWorkers, kBatchKeys, load.repeat, report.table(), controller_peers_table(*others, report.figures()));
  std::fflush(stdout);
  report.figures()["hashes"] = load.num_hashes;
  report.figures()["wrong_answers"] = 0;  // or there would be no figures
  report.figures()["machine"] = host_facts();
  if (!peers->empty()) {
    report.figures()["peers"] = others->peers;
    report.figures()["peers_missing"] = others->missing;
  }
  if (Result<void> ok = write_json(flags.json_file, report.figures()); !ok) return ok;
  return draw(flags.plot_file, report.figures().contains("peers") ? "controller_peers_plot.py" : "controller_plot.py",
              report.figures(), [&](const std::string& line) { report.say(line); });
}

}  // namespace kvferry::bench
