#include <memory>

#include "launch/bench/connector/connector_bench.h"
#include "launch/bench/controller/controller_bench.h"
#include "launch/bench/fleet/fleet_bench.h"
#include "launch/bench/transfer/transfer_bench.h"
#include "launch/cli/commands.h"

namespace kvferry::cli {
namespace {

Result<void> run_transfer(const bench::TransferFlags& flags) {
  const Result<bench::TransferOptions> options = bench::parse_options(flags);
  if (!options) return options.error();
  if (options->listen) return bench::run_listener(*options->listen, false);
  return bench::run_driver(*options);
}

Run add_transfer(CLI::App& bench_app, CLI::App*& command) {
  command = bench_app.add_subcommand(
      "transfer",
      "Move paged blocks in random order between two processes, of this host or of two, and compare with the "
      "machine's limits and with other engines. GB/s are medians, 10^9 bytes; latency is one block, one way.");
  auto flags = std::make_shared<bench::TransferFlags>();
  const auto text = [&](const char* name, std::string& value, const char* help) {
    command->add_option(name, value, help)->capture_default_str();
  };
  text("--peers", flags->peers, "Also measure these, installed from PyPI on demand: nixl, mooncake, ucx");
  text("--path", flags->path, "What carries the bytes: auto, shm, cma, ucx, tcp; several with commas");
  text("--memory", flags->memory, "Whose memory: kvferry (shared, as its pools), foreign (private); or both");
  text("--op", flags->op, "push, pull, or both");
  text("--block-bytes", flags->block_bytes, "Block sizes");
  text("--blocks", flags->blocks, "Blocks in one request [as many as make 64 MiB]");
  text("--model", flags->model, "Block size and count of a model: llama-3.1-8b, llama-3.1-70b, qwen3-32b, deepseek-v3");
  text("--dtype", flags->dtype, "The model's KV cache: bf16, fp8");
  text("--tokens", flags->tokens, "The model's request");
  text("--tp", flags->tp, "Ranks that share the model's KV heads out");
  text("--repeat", flags->repeat, "Repetitions, after one that does not count");
  text("--json", flags->json_file, "Write all rows there");
  text("--plot", flags->plot_file, "Draw them there (.png); installs matplotlib on demand");
  text("--listen", flags->listen, "Be the far side for drivers: HOST:PORT");
  text("--connect", flags->connect, "Drive against the listener there: HOST:PORT [a process of this host]");
  command->add_flag("--pin,!--no-pin", flags->pin, "Pin the two programs' own threads to a core each [on]");
  return [flags] { return run_transfer(*flags); };
}

Run add_controller(CLI::App& bench_app, CLI::App*& command) {
  command = bench_app.add_subcommand(
      "controller",
      "Look up, index and evict chunks on one core, in this process and over the controller's sockets: rates, "
      "latencies, bytes a hash, and what this machine's memory and empty messages take in the same run.");
  auto flags = std::make_shared<bench::ControllerFlags>();
  command->add_option("--hashes", flags->hashes, "Hashes in the index")->capture_default_str();
  command->add_option("--repeat", flags->repeat, "Repetitions; the median counts")->capture_default_str();
  command->add_option("--peers", flags->peers,
                      "Also measure these, installed from PyPI on demand: dynamo, lmcache, mooncake, redis");
  command->add_option("--json", flags->json_file, "Write all figures there");
  command->add_option("--plot", flags->plot_file, "Draw them there (.png); installs matplotlib on demand");
  return [flags] { return bench::run_controller_bench(*flags); };
}

Run add_connector(CLI::App& bench_app, CLI::App*& command) {
  command = bench_app.add_subcommand(
      "connector",
      "Time what vLLM's scheduler pays for a KV connector's calls: lookups and steps, by vLLM's own scheduler where "
      "a Python with vLLM is found, and of the C++ core alone. Microseconds.");
  auto flags = std::make_shared<bench::ConnectorFlags>();
  const auto text = [&](const char* name, std::string& value, const char* help) {
    command->add_option(name, value, help)->capture_default_str();
  };
  text("--tokens", flags->tokens, "Of a request that is looked up");
  text("--running", flags->running, "Requests that decode in a step");
  text("--repeat", flags->repeat, "Lookups and steps; the median counts");
  text("--peers", flags->peers, "Also measure vLLM's connectors for these: nixl, lmcache");
  text("--python", flags->python, "A Python that has vLLM [the checkout's .venv, else python3]");
  text("--json", flags->json_file, "Write all figures there");
  return [flags] { return bench::run_connector_bench(*flags); };
}

Run add_fleet(CLI::App& bench_app, CLI::App*& command) {
  command = bench_app.add_subcommand(
      "fleet",
      "Let thousands of simulated nodes join a controller, or three that share etcd and Redis: messages a second, "
      "lookup latency, memory, dead nodes, restarts. The nodes are real clients; numbers are for one node.");
  auto flags = std::make_shared<bench::FleetFlags>();
  const auto text = [&](const char* name, std::string& value, const char* help) {
    command->add_option(name, value, help)->capture_default_str();
  };
  command->add_option("--nodes,--steps", flags->nodes, "Nodes; several sizes with commas")->capture_default_str();
  text("--replicas", flags->replicas, "Controllers: 1, or 3 with etcd and Redis, which are started too");
  text("--over", flags->over, "How nodes reach it: zmq, stream");
  text("--seconds", flags->seconds, "How long the traffic is measured");
  text("--chunks", flags->chunks, "Chunks that a node holds");
  text("--stores", flags->stores, "Chunks that a node stores a second; it evicts as many");
  text("--lookups", flags->lookups, "Lookups of 128 keys a second; several rates with commas");
  text("--json", flags->json_file, "Write all figures there");
  text("--plot", flags->plot_file, "Draw them there (.png); installs matplotlib on demand");
  return [flags] { return bench::run_fleet_bench(*flags); };
}

}  // namespace

Run add_bench_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Measure kvferry on this machine, or between two");
  command->require_subcommand(1);
  CLI::App* transfer = nullptr;
  const Run run_it = add_transfer(*command, transfer);
  CLI::App* controller = nullptr;
  const Run run_controller = add_controller(*command, controller);
  CLI::App* connector = nullptr;
  const Run run_connector = add_connector(*command, connector);
  CLI::App* fleet = nullptr;
  const Run run_fleet = add_fleet(*command, fleet);
  // What the benchmark starts itself as; not for people.
  CLI::App* worker = command->add_subcommand("worker", "")->group("");
  CLI::App* listener = command->add_subcommand("listener", "")->group("");
  return [=]() -> Result<void> {
    if (worker->parsed()) return bench::run_worker();
    if (listener->parsed()) return bench::run_listener({"127.0.0.1", 0}, true);
    if (controller->parsed()) return run_controller();
    if (connector->parsed()) return run_connector();
    if (fleet->parsed()) return run_fleet();
    return run_it();
  };
}

}  // namespace kvferry::cli
