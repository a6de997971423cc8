#include "launch/bench/controller/controller_far_side.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <vector>

#include "controller/server/server.h"
#include "launch/bench/controller/controller_echo.h"
#include "launch/bench/controller/controller_nodes.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/harness/pinned.h"
#include "transport/base/log.h"

namespace kvferry::bench {
namespace {

constexpr TimeNs kPatience = 600 * kSecond;

void load_into(controller::Directory& directory, const ControllerLoad& load, TimeNs now) {
  DirectoryWorkers workers(directory, now);
  std::vector<controller::ChunkEntry> chunks(kBatchKeys);
  for_each_batch(0, load.num_prefixes(), [&](std::uint32_t worker, std::uint64_t prefix, std::uint64_t position) {
    fill_chunks(prefix, position, chunks);
    workers.publish(worker, chunks, now);
  });
}

/// Serves in the child until the process ends.
Result<void> serve(const ControllerLoad& load, const std::string& folder, LineLink& link) {
  log().set_level(spdlog::level::err);
  const SteadyClock clock;
  controller::ServerOptions options{
      .bind = "tcp://127.0.0.1:0", .stream = "unix://" + folder + "/controller", .directory = {}};
  options.directory.lease_ms = 24 * 3600 * 1000;  // the workers send no heartbeats
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
  Result<TemporaryFolder> folder = TemporaryFolder::make();
  if (!folder) return std::move(folder).error();
  std::unique_ptr<ControllerFarSide> far(new ControllerFarSide(std::move(*folder)));
  int pipe[2];
  if (::pipe(pipe) != 0) return Error{ErrorCode::kUnavailable, "no pipe left for the benchmark's controller"};
  far->pid_ = ::fork();
  if (far->pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    pin_calling_thread(1);  // the client has core 0; the two cores decide the time of a round trip
    LineLink link(-1, pipe[1]);
    if (const Result<void> served = serve(load, far->folder_.path(), link); !served)
      (void)link.send(to_json(served.error()));
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
}

}  // namespace kvferry::bench
