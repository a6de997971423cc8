#include <algorithm>
#include <memory>
#include <vector>

#include "launch/bench/connector/connector_bench.h"
#include "launch/bench/controller/controller_bench.h"
#include "launch/bench/fleet/fleet_bench.h"
#include "launch/bench/transfer/transfer_bench.h"
#include "launch/cli/commands.h"

namespace kvferry::cli {
namespace {

struct Bench {
  CLI::App* command;
  Run run;
};

void text(CLI::App* command, const char* name, std::string& value, const char* help) {
  command->add_option(name, value, help)->capture_default_str();
}

Result<void> run_transfer(const bench::TransferFlags& flags) {
  const bench::TransferOptions options = KVFERRY_TRY(bench::parse_options(flags));
  if (options.listen) return bench::run_listener(*options.listen, false);
  return bench::run_driver(options);
}

Bench add_transfer(CLI::App& bench_app) {
  CLI::App* command = bench_app.add_subcommand(
      "transfer",
      "Move paged blocks in random order between two processes, on this host or on two, and compare with the "
      "machine's limits and with other engines. GB/s (10^9 bytes per second) are medians; the latency is that of one "
      "block in one direction.");
  auto flags = std::make_shared<bench::TransferFlags>();
  text(command, "--peers", flags->peers,
       "Other engines to measure too, separated by commas, installed from PyPI on demand: nixl, mooncake, ucx");
  text(command, "--path", flags->path, "Transport paths to measure, separated by commas: auto, shm, cma, ucx, tcp");
  text(command, "--memory", flags->memory,
       "Kinds of memory, separated by commas: kvferry (shared, like its pools), foreign (private)");
  text(command, "--op", flags->op, "Directions of the transfers, separated by commas: push, pull");
  text(command, "--block-bytes", flags->block_bytes, "Block sizes, such as 64KiB, separated by commas");
  text(command, "--blocks", flags->blocks,
       "Number of blocks in one request [as many as are needed for 64 MiB; with --model, as the prompt has]");
  text(command, "--model", flags->model,
       "Model whose block size and count to use: llama-3.1-8b, llama-3.1-70b, qwen3-32b, deepseek-v3");
  text(command, "--dtype", flags->dtype, "Data type of the model's KV cache (with --model): bf16, fp8");
  text(command, "--tokens", flags->tokens, "Prompt length in tokens (with --model)");
  text(command, "--tp", flags->tp, "Number of tensor parallel ranks that share the model's KV heads (with --model)");
  text(command, "--repeat", flags->repeat, "Number of repetitions of each measurement, after one warm-up");
  text(command, "--json", flags->json_file, "File to which all rows are written as JSON");
  text(command, "--plot", flags->plot_file, "File to which a plot is written (.png); installs matplotlib on demand");
  text(command, "--listen", flags->listen,
       "Wait at this address, HOST:PORT, for a benchmark that another host starts with --connect");
  text(command, "--connect", flags->connect,
       "Address of the listener on another host: HOST:PORT [measure between processes of this host]");
  command->add_flag("--pin,!--no-pin", flags->pin, "Pin the main threads of the two processes to a core each [on]");
  return {command, [flags] { return run_transfer(*flags); }};
}

Bench add_controller(CLI::App& bench_app) {
  CLI::App* command = bench_app.add_subcommand(
      "controller",
      "Measure how fast the controller looks up, indexes and evicts chunks on one core, in this process and over its "
      "sockets: rates, latencies and bytes per hash (chunk key). For comparison, also measure random reads of this "
      "machine's memory and round trips of empty messages.");
  auto flags = std::make_shared<bench::ControllerFlags>();
  text(command, "--hashes", flags->hashes, "Number of hashes (chunk keys) in the index");
  text(command, "--repeat", flags->repeat, "Number of repetitions; the median of their figures is reported");
  text(command, "--peers", flags->peers,
       "Chunk directories of other projects to measure too, separated by commas: dynamo, lmcache, mooncake (these are "
       "installed from PyPI on demand), redis (needs the program redis-server)");
  text(command, "--json", flags->json_file, "File to which all figures are written as JSON");
  text(command, "--plot", flags->plot_file, "File to which a plot is written (.png); installs matplotlib on demand");
  return {command, [flags] { return bench::run_controller_bench(*flags); }};
}

Bench add_connector(CLI::App& bench_app) {
  CLI::App* command = bench_app.add_subcommand(
      "connector",
      "Measure the time that vLLM's scheduler spends in a KV connector's lookups and steps, in microseconds: called by "
      "vLLM's own scheduler if a Python with vLLM is found, and for the C++ core alone.");
  auto flags = std::make_shared<bench::ConnectorFlags>();
  text(command, "--tokens", flags->tokens, "Prompt length in tokens of a request that is looked up");
  text(command, "--running", flags->running, "Number of requests that decode in each step");
  text(command, "--repeat", flags->repeat, "Number of lookups and of steps; p50 and p99 of their times are reported");
  text(command, "--peers", flags->peers,
       "Other KV connectors of vLLM to measure too, separated by commas: nixl, lmcache");
  text(command, "--python", flags->python,
       "Python interpreter that has vLLM [that of the checkout's .venv; without a .venv, python3]");
  text(command, "--json", flags->json_file, "File to which all figures are written as JSON");
  return {command, [flags] { return bench::run_connector_bench(*flags); }};
}

Bench add_fleet(CLI::App& bench_app) {
  CLI::App* command = bench_app.add_subcommand(
      "fleet",
      "Let thousands of simulated nodes join one controller, or three controllers that share etcd and Redis, and "
      "measure messages per second, lookup latency, memory, and how long it takes until a dead node is noticed and "
      "until all nodes have joined a restarted controller. The nodes are real clients of the controller; --chunks, "
      "--stores and --lookups are for each node.");
  auto flags = std::make_shared<bench::FleetFlags>();
  text(command, "--nodes,--steps", flags->nodes, "Numbers of nodes, separated by commas; each is measured by itself");
  text(command, "--replicas", flags->replicas,
       "Number of controllers: 1, or 3 with an etcd and a Redis, which this command starts too");
  text(command, "--over", flags->over, "Kind of connection between nodes and controller: zmq, stream");
  text(command, "--seconds", flags->seconds, "Length of the measurement of steady traffic, in seconds");
  text(command, "--chunks", flags->chunks, "Number of chunks that each node holds");
  text(command, "--stores", flags->stores,
       "Number of chunks that each node stores per second; the node evicts as many");
  text(command, "--lookups", flags->lookups,
       "Number of lookups of each node per second, each of 128 keys; several rates are separated by commas");
  text(command, "--json", flags->json_file, "File to which all figures are written as JSON");
  text(command, "--plot", flags->plot_file, "File to which a plot is written (.png); installs matplotlib on demand");
  return {command, [flags] { return bench::run_fleet_bench(*flags); }};
}

}  // namespace

Run add_bench_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure kvferry on this machine, or between two machines");
  command->require_subcommand(1);
  const std::vector<Bench> all{
      add_transfer(*command),
      add_controller(*command),
      add_connector(*command),
      add_fleet(*command),
      // Commands with which the benchmark starts this program again; --help does not list these commands.
      {command->add_subcommand("worker", "")->group(""), bench::run_worker},
      {command->add_subcommand("listener", "")->group(""),
       [] {
         return bench::run_listener({"127.0.0.1", 0}, true);
       }},
  };
  return [all] {
    return std::find_if(all.begin(), all.end(), [](const Bench& one) { return one.command->parsed(); })->run();
  };
}

}  // namespace kvferry::cli
