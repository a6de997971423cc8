#include "launch/bench/connector/connector_calls.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstdlib>
#include <filesystem>
#include <thread>

#include "controller/server/server.h"
#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/byte_size.h"

namespace kvferry::bench {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr std::string_view kPeers[] = {"nixl", "lmcache"};
constexpr TimeNs kPatience = 300 * kSecond;  // vLLM's import alone takes ten seconds

/// On a thread of its own.
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

Result<Json> hear_figures(ChildProcess& child, const std::function<void(const std::string&)>& say) {
  Json figures;
  while (true) {
    const Result<Json> line = checked(child.link().receive(kPatience));
    if (!line) {
      if (line.error().code != ErrorCode::kPeerLost) return line.error();
      return Error{ErrorCode::kUnavailable, fmt::format("its program ended early: {}", child.last_words())};
    }
    if (line->contains("done")) return figures;
    if (line->contains("step") && (*line)["step"].is_string()) say((*line)["step"].get<std::string>());
    if (line->contains("figures") && (*line)["figures"].is_object()) figures = (*line)["figures"];
  }
}

}  // namespace

Result<std::vector<std::string>> parse_connector_peers(const std::string& text) {
  std::vector<std::string> peers = text.empty() ? std::vector<std::string>{} : split_list(text);
  for (auto peer = peers.begin(); peer != peers.end(); ++peer) {
    if (std::find(std::begin(kPeers), std::end(kPeers), *peer) == std::end(kPeers) ||
        std::find(peers.begin(), peer, *peer) != peer) {
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("--peers is '{}'; allowed: one or more of {}, each once, with commas between", text,
                               fmt::join(kPeers, ", "))};
    }
  }
  return peers;
}

std::string vllm_python(const std::string& given) {
  if (!given.empty()) return given;
  char self[PATH_MAX] = {};
  const ssize_t length = ::readlink("/proc/self/exe", self, sizeof(self) - 1);
  // REPOSITORY/build/release/bin/kvferry
  const fs::path root = fs::path(length > 0 ? self : "/").parent_path().parent_path().parent_path().parent_path();
  std::error_code ignored;
  const fs::path python = root / ".venv" / "bin" / "python";
  return fs::exists(python, ignored) ? python.string() : "python3";
}

Result<Json> measure_connector_calls(const std::string& connector, const ConnectorCalls& calls,
                                     const std::function<void(const std::string&)>& say) {
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
  Result<ChildProcess> child = ChildProcess::start({{calls.python, *script}, environment});
  if (!child) return std::move(child).error();
  // A program that ended at once is better told of by its last words.
  if (Result<void> sent = child->link().send(spec); !sent && sent.error().code != ErrorCode::kPeerLost)
    return std::move(sent).error();
  return hear_figures(*child, say);
}

}  // namespace kvferry::bench
