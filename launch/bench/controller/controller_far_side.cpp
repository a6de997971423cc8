#include "launch/bench/controller/controller_far_side.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <vector>

#include "controller/server/server.h"
#include "launch/bench/controller/controller_echo.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/harness/pinned.h"
#include "transport/base/log.h"

namespace kvferry::bench {
namespace {

using controller::NodeId;
using controller::SnapshotMark;

constexpr TimeNs kPatience = 600 * kSecond;

/// `now`: leases begin then, and the machine may have been up for longer than they last.
void load_into(controller::Directory& directory, const ControllerLoad& load, TimeNs now) {
  std::vector<NodeId> nodes;
  for (std::uint32_t i = 0; i < kNumWorkers; ++i) {
    const controller::NodeInfo info{
        EngineId{fmt::format("worker{}", i)}, Incarnation{1}, "kv_both", "tcp://10.0.0.1:1", "", "model"};
    nodes.push_back(directory.join(info, 0, now).value().id);
    directory.publish(nodes.back(), 0, SnapshotMark::kReplaces, {}, now);
  }
  std::vector<ChunkKey> keys(kBatchKeys);
  std::vector<controller::ChunkEntry> chunks(kBatchKeys);
  for_each_batch(
      0, load.num_prefixes(), [&](controller::NodeIndex worker, std::uint64_t prefix, std::uint64_t position) {
        fill_keys<ChunkKey>(prefix, position, keys);
        for (std::size_t i = 0; i < kBatchKeys; ++i) chunks[i].key = keys[i];
        directory.publish(nodes[worker], directory.repair(nodes[worker]).resend_from, SnapshotMark::kNone, chunks, now);
      });
}

/// Of the child; ends with the process.
Result<void> serve(const ControllerLoad& load, const std::string& folder, LineLink& link) {
  log().set_level(spdlog::level::err);
  const SteadyClock clock;
  controller::ServerOptions options{
      .bind = "tcp://127.0.0.1:0", .stream = "unix://" + folder + "/controller", .directory = {}};
  options.directory.lease_ms = 24 * 3600 * 1000;  // its workers never say a word
  options.directory.chunks_per_node_max = kControllerHashesMax;
  options.directory.chunks_max = 2 * kControllerHashesMax;
  options.directory.index.seed = 1;
  Result<std::unique_ptr<controller::Server>> server = controller::Server::bind(options, clock);
  if (!server) return std::move(server).error();
  load_into((*server)->directory(), load, clock.now());
  const Result<std::string> zmq_echo = start_zmq_echo();
  if (!zmq_echo) return zmq_echo.error();
  const Result<std::string> stream_echo = start_stream_echo(folder + "/echo");
  if (!stream_echo) return stream_echo.error();
  Result<void> told = link.send({{"zmq", (*server)->endpoint()},
                                 {"stream", (*server)->stream_endpoint()},
                                 {"zmq_echo", *zmq_echo},
                                 {"stream_echo", *stream_echo}});
  if (!told) return told;
  (*server)->run();
  return {};
}

}  // namespace

Result<std::unique_ptr<ControllerFarSide>> ControllerFarSide::start(const ControllerLoad& load) {
  std::unique_ptr<ControllerFarSide> far(new ControllerFarSide);
  char folder[] = "/tmp/kvferry-benchXXXXXX";
  int pipe[2];
  if (::mkdtemp(folder) == nullptr || ::pipe(pipe) != 0)
    return Error{ErrorCode::kUnavailable, "no folder or pipe left for the benchmark's controller"};
  far->folder_ = folder;
  far->pid_ = ::fork();
  if (far->pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    pin_calling_thread(1);  // the other side has core 0: where the two run decides the time of a round trip
    LineLink link(-1, pipe[1]);
    if (const Result<void> served = serve(load, folder, link); !served) (void)link.send(to_json(served.error()));
    ::_exit(0);
  }
  ::close(pipe[1]);
  LineLink link(pipe[0], -1);
  if (far->pid_ < 0) return Error{ErrorCode::kUnavailable, "no process left for the benchmark's controller"};
  const Result<nlohmann::json> up = checked(link.receive(kPatience));
  if (!up) return Error{up.error()}.with("the benchmark's controller");
  far->zmq = up->at("zmq");
  far->stream = up->at("stream");
  far->zmq_echo = up->at("zmq_echo");
  far->stream_echo = up->at("stream_echo");
  return far;
}

ControllerFarSide::~ControllerFarSide() {
  if (pid_ > 0) {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

double ControllerFarSide::cpu_s() const {
  clockid_t clock{};
  timespec time{};
  ::clock_getcpuclockid(pid_, &clock);
  ::clock_gettime(clock, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

}  // namespace kvferry::bench
