#include "launch/bench/transfer/worker.h"

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <optional>

#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/harness/pinned.h"
#include "launch/bench/harness/programs.h"
#include "launch/bench/harness/statistics.h"
#include "launch/bench/transfer/engine.h"
#include "transport/base/huge_pages.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kBytesMax = 1ULL << 40;
constexpr std::uint64_t kRoundsMax = 1'000'000;
constexpr TimeNs kForever = 24 * 3600 * kSecond;

Error bad_message(const char* what) {
  return {ErrorCode::kInvalidArgument, fmt::format("bad benchmark message: {}", what)};
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
  return found == makers.end() ? nullptr : found->second();
}

class Worker {
 public:
  explicit Worker(LineLink& link) : link_(link) {}

  Result<Json> start(const Json& message) {
    const Result<WorkerSpec> spec = worker_spec(message);
    if (!spec) return spec.error();
    spec_ = *spec;
    Result<BenchMemory> memory = BenchMemory::make(spec_.memory, spec_.bytes);
    if (!memory) return std::move(memory).error();
    memory_.emplace(std::move(*memory));
    engine_ = make_worker_engine(spec_.engine);
    if (engine_ == nullptr) return bad_message("unknown engine");
    Result<Json> peer = engine_->start(spec_, *memory_);
    if (!peer) return peer;
    if (spec_.core >= 0) pin_calling_thread(spec_.core);  // the engine's threads exist already and stay unpinned
    return Json{{"peer", std::move(*peer)}, {"huge_page_bytes", huge_page_bytes(memory_->span())}};
  }

  Result<Json> obey(const Json& message) {
    const std::string what = text(message, "do");
    if (what == "connect") return answer_of(engine_->connect(message.value("peer", Json::object())));
    if (what == "prepare") return prepare(message.value("job", Json::object()));
    if (what == "fill") return fill(number(message, "seed"));
    if (what == "verify") return verify(number(message, "seed"));
    if (job_.num_blocks == 0) return bad_message("nothing is prepared");
    if (what == "transfer") return transfer();
    if (what == "answer") return answer();
    const std::uint64_t rounds = number(message, "rounds");
    if (rounds == 0 || rounds > kRoundsMax) return bad_message("rounds");
    if (what == "ping") return ping(rounds);
    if (what == "pong") return pong(rounds);
    return bad_message("unknown command");
  }

 private:
  static Result<Json> answer_of(Result<void> done) {
    if (!done) return std::move(done).error();
    return Json::object();
  }

  Result<Json> prepare(const Json& message) {
    job_ = {};
    const Job job{text(message, "op") == "push", number(message, "block_bytes"), number(message, "num_blocks"),
                  number(message, "order_seed")};
    if (job.block_bytes == 0 || job.block_bytes % 8 != 0 || job.num_blocks == 0 ||
        job.num_blocks > spec_.bytes / job.block_bytes)
      return bad_message("the job does not fit the memory");
    job_ = job;
    engine_->prepare(job, spec_.side, number(message, "call_bytes"));
    return Json::object();
  }

  Result<Json> fill(std::uint64_t seed) {
    fill_pattern(memory_->span(), seed, spec_.side);
    fill_pattern(engine_->target_memory(), seed, Side::kTarget);
    return Json::object();
  }

  Result<Json> verify(std::uint64_t seed) {
    const std::span<std::byte> others = engine_->target_memory();
    const std::span<std::byte> destination = job_.is_push && !others.empty() ? others : memory_->span();
    if (std::getenv("KVFERRY_BENCH_DAMAGE") != nullptr)
      destination[0] ^= std::byte{1};  // the benchmark's tests want a mismatch
    return Json{{"verified", holds_pattern(destination, job_, seed)}, {"describe", engine_->describe()}};
  }

  Result<Json> transfer() {
    const double cpu_begin = cpu_seconds(::getpid());
    const TimeNs begin = clock_.now();
    if (Result<void> ok = engine_->transfer(); !ok) return std::move(ok).error();
    const TimeNs end = clock_.now();
    return Json{{"seconds", static_cast<double>(end - begin) * 1e-9}, {"cpu_s", cpu_seconds(::getpid()) - cpu_begin}};
  }

  Result<Json> answer() {
    if (Result<void> ok = link_.send({{"ready", true}}); !ok) return std::move(ok).error();
    const double cpu_begin = cpu_seconds(::getpid());
    if (Result<void> ok = engine_->answer(); !ok) return std::move(ok).error();
    return Json{{"cpu_s", cpu_seconds(::getpid()) - cpu_begin}};
  }

  Result<Json> ping(std::uint64_t rounds) {
    std::vector<double> times_us(rounds);
    const double us_per_ns = engine_->is_round_trip() ? 0.5e-3 : 1e-3;
    for (double& time_us : times_us) {
      const TimeNs begin = clock_.now();
      if (Result<void> ok = engine_->ping(); !ok) return std::move(ok).error();
      time_us = static_cast<double>(clock_.now() - begin) * us_per_ns;
    }
    return Json{{"p50_us", percentile(times_us, 50)}, {"p99_us", percentile(times_us, 99)}};
  }

  Result<Json> pong(std::uint64_t rounds) {
    if (Result<void> ok = link_.send({{"ready", true}}); !ok) return std::move(ok).error();
    for (std::uint64_t round = 0; round < rounds; ++round) {
      if (Result<void> ok = engine_->pong(); !ok) return std::move(ok).error();
    }
    return Json::object();
  }

  LineLink& link_;
  const SteadyClock clock_;
  WorkerSpec spec_;
  std::optional<BenchMemory> memory_;
  std::unique_ptr<Engine> engine_;  // after the memory, which it uses
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

Result<WorkerSpec> worker_spec(const nlohmann::json& message) {
  const auto core = message.find("core");
  const WorkerSpec spec{text(message, "engine"),
                        text(message, "setting"),
                        text(message, "path"),
                        text(message, "memory") == "kvferry" ? MemoryKind::kKvferry : MemoryKind::kForeign,
                        text(message, "side") == "initiator" ? Side::kInitiator : Side::kTarget,
                        number(message, "bytes"),
                        core != message.end() && core->is_number_integer() ? core->get<int>() : -1,
                        text(message, "host")};
  if (spec.bytes == 0 || spec.bytes > kBytesMax || spec.core >= CPU_SETSIZE) return bad_message("worker out of bounds");
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
  // Libraries that print to stdout must not mix their output with the answers.
  LineLink link(::fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3), ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3));
  ::dup2(STDERR_FILENO, STDOUT_FILENO);
  Worker worker(link);
  for (bool is_started = false;;) {
    Result<Json> message = link.receive(kForever);
    if (!message) return message.error().code == ErrorCode::kPeerLost ? Result<void>() : std::move(message).error();
    Result<Json> answer = is_started ? worker.obey(*message) : worker.start(*message);
    const bool is_broken = !answer;
    if (Result<void> ok = link.send(answer ? *answer : to_json(answer.error())); !ok) return {};
    if (is_broken) return {};
    is_started = true;
  }
}

}  // namespace kvferry::bench
