#include <fmt/ranges.h>

#include <cstdio>
#include <map>
#include <optional>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/interrupt.h"
#include "launch/bench/harness/progress.h"
#include "launch/bench/transfer/measure.h"
#include "launch/bench/transfer/transfer_bench.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

/// Returns the engines to measure on this path: kvferry, then the machine's limits, then the peers.
std::vector<Contender> contenders(const std::string& path, const std::vector<std::string>& peers, bool is_same_host) {
  std::vector<Contender> all{{.engine = "kvferry", .setting = "default"}};
  if (is_same_host && path != "tcp" && path != "ucx") all.push_back({.engine = "kvferry", .setting = "1 thread"});
  if (path == "tcp") {
    all.push_back({.engine = "kvferry", .setting = "with key"});
    all.push_back({.engine = "kvferry", .setting = "member, granted"});
    all.push_back({.engine = "kvferry", .setting = "encrypted"});
  }
  if (path == "shm") all.push_back({.engine = "kvferry", .setting = "granted"});
  if (is_same_host && path != "tcp") {
    all.push_back({.engine = "memcpy", .setting = "1 thread", .is_limit = true});
    all.push_back({.engine = "cma", .setting = "1024 ranges", .is_limit = true});
  }
  if (!is_same_host || path == "tcp" || path == "ucx" || path == "auto")
    all.push_back({.engine = "socket", .setting = "best", .is_limit = true});
  for (const std::string& peer : peers) {
    if (peer == "mooncake" && path != "tcp") continue;  // without RDMA, Mooncake has only the path tcp
    all.push_back({.engine = peer, .setting = "default", .is_peer = true, .is_free = peer != "ucx"});
    if (peer != "mooncake") all.push_back({.engine = peer, .setting = "best", .is_peer = true});
  }
  return all;
}

std::string settings_of(const std::vector<Point>& points) {
  std::vector<std::string> settings;
  for (const Point& point : points) settings.push_back(point.contender.setting);
  return fmt::format("{}", fmt::join(settings, " / "));
}

void say(const std::string& line) { fmt::print(stderr, "{}\n", line); }

class Driver {
 public:
  explicit Driver(const TransferOptions& options) : options_(options) {}

  void run() {
    if (!options_.derivation.empty()) fmt::print("{}\n", options_.derivation);
    far_.open(options_.connect);
    install_peers();
    measure_all();
    fmt::print("{}", table_of(rows_));
    std::fflush(stdout);
    write_json(options_.json_file, figures());
    draw(options_.plot_file, "transfer", figures(), say);
  }

 private:
  void install_peers() {
    for (const std::string& peer : options_.peers) {
      try_part(peer, missing_, say, [&] {
        ensure_installed(peer, say);
        far_.install(peer);
      });
    }
  }

  /// Returns all measurements. Those of one path, kind of memory and block size follow each other, so that other load
  /// on the machine is about the same for all of them, and kvferry's settings are one measurement, in which they take
  /// turns.
  std::vector<std::vector<Point>> measurements() const {
    std::vector<std::vector<Point>> all;
    for (const std::string& path : options_.paths)
      for (const MemoryKind memory : options_.memories) {
        if (path == "shm" && memory == MemoryKind::kForeign && options_.memories.size() > 1)
          continue;  // another process can't map private memory, so there is nothing to measure
        for (const Shape& shape : options_.shapes) {
          all.emplace_back();  // kvferry's
          for (const Contender& contender : contenders(path, options_.peers, far_.is_same_host())) {
            if (contender.engine != "kvferry") all.emplace_back();
            all.back().push_back({path, memory, shape, contender});
          }
        }
      }
    return all;
  }

  void measure_all() {
    const std::vector<std::vector<Point>> all = measurements();
    Progress progress(all.size());
    for (const std::vector<Point>& points : all) {
      const auto& [path, memory, shape, contender] = points.front();
      const std::string& engine = contender.engine;
      if (!missing_.contains(engine)) {
        progress.begin_step(fmt::format("{} {}, path {}, {} memory, {}", engine, settings_of(points), path,
                                        name_of(memory), byte_size_text(shape.block_bytes)));
        const auto measure_points = [&] {
          const std::vector<Measured> measured = measure(points, options_, far_);
          for (std::size_t i = 0; i < points.size(); ++i) take(points[i], measured[i], progress);
        };
        const Say warn = [&](const std::string& line) {
          progress.make_room();
          say(line);
        };
        if (engine == "kvferry")
          measure_points();  // a failure ends the run, because without kvferry's rows there is nothing to compare with
        else
          try_part(engine, missing_, warn, measure_points);
      }
      progress.end_step();
    }
  }

  void take(const Point& point, const Measured& measured, Progress& progress) {
    rows_.insert(rows_.end(), measured.rows.begin(), measured.rows.end());
    const std::string name = fmt::format("{} {}, path {}", point.contender.engine, point.contender.setting, point.path);
    if (!measured.describe.empty() && engines_[name] != measured.describe) {
      engines_[name] = measured.describe;
      progress.say(fmt::format("{}: {}", name, measured.describe));
    }
    const char* memory = name_of(point.memory);
    const double share = static_cast<double>(measured.huge_page_bytes) /
                         static_cast<double>(point.shape.block_bytes * point.shape.num_blocks);
    if (point.contender.engine == "kvferry" && !huge_shares_.contains(memory)) {
      huge_shares_[memory] = share;
      progress.say(fmt::format("{1:.0f} % of {0} memory is backed by huge pages", memory, 100 * share));
    }
  }

  Json figures() const {
    Json machine = host_facts();
    machine["huge_page_share"] = huge_shares_;
    return {{"rows", rows_}, {"machine", std::move(machine)}, {"engines", engines_}, {"peers_missing", missing_}};
  }

  const TransferOptions& options_;
  FarSide far_;
  std::vector<Row> rows_;
  std::map<std::string, std::string> engines_;
  Json missing_ = Json::object();  // the error of each engine that failed
  std::map<std::string, double> huge_shares_;
};

}  // namespace

Result<void> run_driver(const TransferOptions& options) {
  catch_interrupts();
  return attempt([&] { Driver(options).run(); });
}

}  // namespace kvferry::bench
