#include "launch/bench/connector/connector_calls.h"

#include <cstdlib>
#include <filesystem>
#include <optional>
#include <thread>

#include "controller/server/server.h"
#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/failure.h"

namespace kvferry::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

/// A controller on a thread of this process.
class OwnController {
 public:
  OwnController() : server_(need(controller::Server::bind(options(), clock_))), thread_([this] { server_->run(); }) {}
  OwnController(const OwnController&) = delete;
  OwnController& operator=(const OwnController&) = delete;
  ~OwnController() {
    server_->stop();
    thread_.join();
  }
  const std::string& endpoint() const { return server_->endpoint(); }

 private:
  static controller::ServerOptions options() {
    controller::ServerOptions options;
    options.bind = "tcp://127.0.0.1:0";
    return options;
  }

  const SteadyClock clock_;
  const std::unique_ptr<controller::Server> server_;
  std::thread thread_;
};

}  // namespace

std::string vllm_python(const std::string& given) {
  if (!given.empty()) return given;
  // In a checkout, this program is ROOT/build/PRESET/bin/kvferry.
  const fs::path root = own_program().parent_path().parent_path().parent_path().parent_path();
  std::error_code ignored;
  const fs::path python = root / ".venv" / "bin" / "python";
  return fs::exists(python, ignored) ? python.string() : "python3";
}

Json measure_connector_calls(const std::string& connector, const ConnectorCalls& calls, const Say& say) {
  Json spec{{"connector", connector},
            {"controller", ""},
            {"prompt_tokens", calls.tokens},
            {"running", calls.running},
            {"repeat", calls.repeat}};
  std::vector<std::string> environment{"PYTHONDONTWRITEBYTECODE=1", "KVFERRY_LOG=error"};
  std::optional<OwnController> controller;
  if (connector == "kvferry") {
    controller.emplace();
    spec["controller"] = controller->endpoint();
  } else if (connector == "lmcache") {
    ensure_installed("connector_lmcache", say);
    const char* path = std::getenv("PYTHONPATH");
    environment.push_back(fmt::format("PYTHONPATH={}:{}", path != nullptr ? path : "", beside_vllm_folder()));
    environment.insert(environment.end(), {"LMCACHE_LOCAL_CPU=True", "LMCACHE_CHUNK_SIZE=256",
                                           "LMCACHE_LOG_LEVEL=ERROR", "LMCACHE_DISABLE_BANNER=1"});
  }
  Json figures;
  run_peer_program({{calls.python, script_path("connector_calls.py")}, environment}, spec, say,
                   [&](const Json& line) { figures = line.value("figures", Json::object()); });
  return figures;
}

}  // namespace kvferry::bench
