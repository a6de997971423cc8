#include "launch/bench/transfer/worker.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <optional>

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/harness/pinned.h"
#include "launch/bench/harness/programs.h"
#include "launch/bench/harness/statistics.h"
#include "launch/bench/transfer/engine.h"
#include "launch/bench/transfer/transfer_bench.h"
#include "transport/base/memory/large_memory.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kBytesMax = 1ULL << 40;
constexpr std::uint64_t kRoundsMax = 1'000'000;
constexpr TimeNs kForever = 24 * 3600 * kSecond;

Failure bad_message(const std::string& what) {
  return Failure(
      {ErrorCode::kInvalidArgument, fmt::format("the benchmark sent its measuring process a wrong message: {}", what)});
}

std::uint64_t number(const Json& message, const char* key) {
  const auto found = message.find(key);
  return found != message.end() && found->is_number_unsigned() ? found->get<std::uint64_t>() : 0;
}

std::string text(const Json& message, const char* key) {
  const auto found = message.find(key);
  return found != message.end() && found->is_string() ? found->get<std::string>() : "";
}

std::unique_ptr<Engine> make_worker_engine(const std::string& name) {
  const std::map<std::string, std::unique_ptr<Engine> (*)()> makers{{"kvferry", make_kvferry_engine},
                                                                    {"memcpy", make_memcpy_engine},
                                                                    {"cma", make_cma_engine},
                                                                    {"socket", make_socket_engine},
                                                                    {"ucx", make_ucx_engine}};
  const auto found = makers.find(name);
  if (found == makers.end())
    throw bad_message(fmt::format("the engine is '{}'; allowed: kvferry, memcpy, cma, socket, ucx", name));
  return found->second();
}

class Worker {
 public:
  explicit Worker(LineLink& link) : link_(link) {}

  Json start(const Json& message) {
    spec_ = worker_spec(message);
    memory_.emplace(spec_.memory, spec_.bytes);
    engine_ = make_worker_engine(spec_.engine);
    const Json peer = engine_->start(spec_, *memory_);
    // Only the calling thread is pinned: the engine's threads exist already and stay unpinned.
    if (spec_.core >= 0) pin_calling_thread(spec_.core);
    return {{"peer", peer}, {"huge_page_bytes", huge_page_bytes(memory_->span())}};
  }

  Json obey(const Json& message) {
    const std::string what = text(message, "do");
    if (what == "connect") {
      engine_->connect(message.value("peer", Json::object()));
      return Json::object();
    }
    if (what == "prepare") return prepare(message.value("job", Json::object()));
    if (what == "fill") return fill(number(message, "seed"));
    if (what == "verify") return verify(number(message, "seed"));
    if (job_.num_blocks == 0) throw bad_message(fmt::format("the command '{}' came before 'prepare'", what));
    if (what == "transfer") return transfer();
    if (what == "answer") return answer();
    const std::uint64_t rounds = number(message, "rounds");
    if (rounds == 0 || rounds > kRoundsMax)
      throw bad_message(fmt::format("the number of rounds is {}; allowed: 1 to {}", rounds, kRoundsMax));
    if (what == "ping") return ping(rounds);
    if (what == "pong") return pong(rounds);
    throw bad_message(fmt::format(
        "the command is '{}'; allowed: connect, prepare, fill, verify, transfer, answer, ping, pong", what));
  }

 private:
  Json prepare(const Json& message) {
    job_ = {};
    const Job job{text(message, "op") == "push", number(message, "block_bytes"), number(message, "num_blocks"),
                  number(message, "order_seed")};
    if (job.block_bytes == 0 || job.block_bytes % 8 != 0 || job.num_blocks == 0 ||
        job.num_blocks > spec_.bytes / job.block_bytes)
      throw bad_message(
          fmt::format("a transfer has {} blocks of {} bytes; allowed: at least one block, of a multiple of 8 bytes, "
                      "and no more than fit into the {} bytes of memory",
                      job.num_blocks, job.block_bytes, spec_.bytes));
    job_ = job;
    engine_->prepare(job, spec_.side, number(message, "call_bytes"));
    return Json::object();
  }

  Json fill(std::uint64_t seed) {
    fill_pattern(memory_->span(), seed, spec_.side);
    fill_pattern(engine_->target_memory(), seed, Side::kTarget);
    return Json::object();
  }

  Json verify(std::uint64_t seed) {
    const std::span<std::byte> others = engine_->target_memory();
    const std::span<std::byte> destination = job_.is_push && !others.empty() ? others : memory_->span();
    if (std::getenv("KVFERRY_BENCH_DAMAGE") != nullptr)
      destination[0] ^= std::byte{1};  // tests use this wrong byte to make the check fail
    return {{"verified", holds_pattern(destination, job_, seed)}, {"describe", engine_->describe()}};
  }

  Json transfer() {
    const double cpu_begin = cpu_seconds(::getpid());
    const TimeNs begin = clock_.now();
    engine_->transfer();
    const TimeNs end = clock_.now();
    return {{"seconds", static_cast<double>(end - begin) * 1e-9}, {"cpu_s", cpu_seconds(::getpid()) - cpu_begin}};
  }

  Json answer() {
    need(link_.send({{"ready", true}}));
    const double cpu_begin = cpu_seconds(::getpid());
    engine_->answer();
    return {{"cpu_s", cpu_seconds(::getpid()) - cpu_begin}};
  }

  Json ping(std::uint64_t rounds) {
    std::vector<double> times_us(rounds);
    const double us_per_ns = engine_->is_round_trip() ? 0.5e-3 : 1e-3;
    for (double& time_us : times_us) {
      const TimeNs begin = clock_.now();
      engine_->ping();
      time_us = static_cast<double>(clock_.now() - begin) * us_per_ns;
    }
    return {{"p50_us", percentile(times_us, 50)}, {"p99_us", percentile(times_us, 99)}};
  }

  Json pong(std::uint64_t rounds) {
    need(link_.send({{"ready", true}}));
    for (std::uint64_t round = 0; round < rounds; ++round) engine_->pong();
    return Json::object();
  }

  LineLink& link_;
  const SteadyClock clock_;
  WorkerSpec spec_;
  std::optional<BenchMemory> memory_;
  std::unique_ptr<Engine> engine_;  // declared after memory_, which the engine uses
  Job job_;
};

}  // namespace

nlohmann::json to_json(const WorkerSpec& spec) {
  return {{"engine", spec.engine},
          {"setting", spec.setting},
          {"path", spec.path},
          {"memory", name_of(spec.memory)},
          {"side", spec.side == Side::kInitiator ? "initiator" : "target"},
          {"bytes", spec.bytes},
          {"core", spec.core},
          {"host", spec.host}};
}

WorkerSpec worker_spec(const nlohmann::json& message) {
  const auto core = message.find("core");
  WorkerSpec spec{text(message, "engine"),
                  text(message, "setting"),
                  text(message, "path"),
                  text(message, "memory") == "kvferry" ? MemoryKind::kKvferry : MemoryKind::kForeign,
                  text(message, "side") == "initiator" ? Side::kInitiator : Side::kTarget,
                  number(message, "bytes"),
                  core != message.end() && core->is_number_integer() ? core->get<int>() : -1,
                  text(message, "host")};
  if (spec.bytes == 0 || spec.bytes > kBytesMax || spec.core >= CPU_SETSIZE)
    throw bad_message(
        fmt::format("the memory has {} bytes and the core is {}; allowed: 1 to {} bytes, and a core below {} or -1",
                    spec.bytes, spec.core, kBytesMax, CPU_SETSIZE));
  return spec;
}

nlohmann::json to_json(const Job& job, std::uint64_t call_bytes) {
  return {{"op", job.is_push ? "push" : "pull"},
          {"block_bytes", job.block_bytes},
          {"num_blocks", job.num_blocks},
          {"order_seed", job.order_seed},
          {"call_bytes", call_bytes}};
}

Result<void> run_worker() {
  catch_interrupts();
  // From here on, what libraries print to stdout goes to stderr, so that it does not mix with the answers.
  LineLink link(OwnedFd(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3)),
                OwnedFd(::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3)));
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  Worker worker(link);
  for (bool is_started = false;;) {
    Result<Json> message = link.receive(kForever);
    if (!message) return message.error().code == ErrorCode::kPeerLost ? Result<void>() : std::move(message).error();
    const Result<Json> answer = attempt([&] { return is_started ? worker.obey(*message) : worker.start(*message); });
    if (!link.send(answer ? *answer : to_json(answer.error())) || !answer) return {};
    is_started = true;
  }
}

}  // namespace kvferry::bench
