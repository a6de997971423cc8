#include "launch/bench/connector/connector_calls.h"

#include <cstdlib>
#include <filesystem>
#include <thread>

#include "controller/server/server.h"
#include "launch/bench/harness/bench_venv.h"

namespace kvferry::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// A controller on a thread of this process.
class OwnController {
 public:
  static Result<std::unique_ptr<OwnController>> start() {
    auto made = std::unique_ptr<OwnController>(new OwnController);
    controller::ServerOptions options;
    options.bind = "tcp://127.0.0.1:0";
    auto server = controller::Server::bind(options, made->clock_);
    if (!server) return std::move(server).error();
    made->server_ = std::move(*server);
    made->thread_ = std::thread([server = made->server_.get()] { server->run(); });
    return made;
  }
  ~OwnController() {
    if (!thread_.joinable()) return;
    server_->stop();
    thread_.join();
  }
  const std::string& endpoint() const { return server_->endpoint(); }

 private:
  OwnController() = default;
  SteadyClock clock_;
  std::unique_ptr<controller::Server> server_;
  std::thread thread_;
};

}  // namespace

std::string vllm_python(const std::string& given) {
  if (!given.empty()) return given;
  // The program is ROOT/build/release/bin/kvferry.
  const fs::path root = own_program().parent_path().parent_path().parent_path().parent_path();
  std::error_code ignored;
  const fs::path python = root / ".venv" / "bin" / "python";
  return fs::exists(python, ignored) ? python.string() : "python3";
}

Result<Json> measure_connector_calls(const std::string& connector, const ConnectorCalls& calls, const Say& say) {
  Json spec{{"connector", connector},
            {"controller", ""},
            {"prompt_tokens", calls.tokens},
            {"running", calls.running},
            {"repeat", calls.repeat}};
  std::vector<std::string> environment{"PYTHONDONTWRITEBYTECODE=1", "KVFERRY_LOG=error"};
  std::unique_ptr<OwnController> controller;
  if (connector == "kvferry") {
    auto started = OwnController::start();
    if (!started) return std::move(started).error();
    controller = std::move(*started);
    spec["controller"] = controller->endpoint();
  } else if (connector == "lmcache") {
    if (Result<void> ok = ensure_installed("connector_lmcache", say); !ok) return std::move(ok).error();
    const char* path = std::getenv("PYTHONPATH");
    environment.push_back(fmt::format("PYTHONPATH={}:{}", path != nullptr ? path : "", beside_vllm_folder()));
    environment.insert(environment.end(), {"LMCACHE_LOCAL_CPU=True", "LMCACHE_CHUNK_SIZE=256",
                                           "LMCACHE_LOG_LEVEL=ERROR", "LMCACHE_DISABLE_BANNER=1"});
  }
  const Result<std::string> script = script_path("connector_calls.py");
  if (!script) return script.error();
  Json figures;
  Result<void> done = run_peer_program({{calls.python, *script}, environment}, spec, say, [&](const Json& line) {
    figures = line.value("figures", Json::object());
    return Result<void>();
  });
  if (!done) return std::move(done).error();
  return figures;
}

}  // namespace kvferry::bench
