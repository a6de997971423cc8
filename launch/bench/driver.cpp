#include "launch/bench/driver.h"

#include <fmt/ranges.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <optional>

#include "launch/bench/byte_size.h"
#include "launch/bench/host_facts.h"
#include "launch/bench/measure.h"
#include "launch/bench/programs.h"
#include "launch/bench/progress.h"

namespace kvferry::bench {
namespace {

using Json = nlohmann::json;

/// The connection to the far side, which is our own child where nobody named one.
class FarSide {
 public:
  Result<void> open(const std::optional<HostPort>& address) {
    HostPort where = address.value_or(HostPort{"127.0.0.1", 0});
    if (!address) {
      Result<ChildProcess> child = ChildProcess::start(self_command({"bench", "listener"}));
      if (!child) return std::move(child).error();
      child_.emplace(std::move(*child));
      const Result<Json> said = child_->link().receive(kPatience);
      if (!said) return Error{said.error().code, "the listener did not start: " + child_->last_words()};
      where.port = said->value("port", std::uint16_t{0});
    }
    Result<int> fd = tcp_connect(where.host, where.port);
    if (!fd) return std::move(fd).error();
    host_ = tcp_local_host(*fd);
    link_.emplace(*fd, *fd);
    return greet();
  }

  LineLink& link() { return *link_; }
  const std::string& host() const { return host_; }
  bool is_same_host() const { return is_same_host_; }

 private:
  Result<void> greet() {
    const Json own = host_facts();
    if (Result<void> ok = link_->send({{"do", "hello"}, {"version", own["version"]}}); !ok) return ok;
    const Result<Json> hello = link_->receive(10 * kSecond);
    if (!hello) return Error{hello.error().code, "no kvferry bench listener there: " + hello.error().what};
    const Json version = hello->value("version", Json());
    if (version != own["version"])
      return Error{
          ErrorCode::kRefused,
          fmt::format("the listener is kvferry {} and this is kvferry {}; install the same version on both hosts",
                      version.dump(), own["version"].dump())};
    is_same_host_ = hello->value("boot_id", Json()) == own["boot_id"];
    return {};
  }

  std::optional<ChildProcess> child_;
  std::optional<LineLink> link_;  // closed first: then the child ends by itself
  std::string host_;
  bool is_same_host_ = false;
};

std::vector<Contender> contenders(const std::string& path, bool is_same_host) {
  std::vector<Contender> all{{.engine = "kvferry", .setting = "default"}};
  if (is_same_host && path != "tcp") {
    all.push_back({.engine = "memcpy", .setting = "1 thread", .is_limit = true});
    all.push_back({.engine = "cma", .setting = "1024 ranges", .is_limit = true});
  }
  if (!is_same_host || path == "tcp" || path == "ucx" || path == "auto")
    all.push_back({.engine = "socket", .setting = "best", .is_limit = true});
  return all;
}

class Driver {
 public:
  explicit Driver(const TransferOptions& options) : options_(options) {}

  Result<void> run() {
    if (!options_.derivation.empty()) fmt::print("{}\n", options_.derivation);
    if (Result<void> ok = far_.open(options_.connect); !ok) return ok;
    if (Result<void> ok = measure_all(); !ok) return ok;
    fmt::print("{}", table_of(rows_));
    std::fflush(stdout);
    return write_json();
  }

 private:
  struct Point {
    std::string path;
    MemoryKind memory;
    Shape shape;
    Contender contender;
  };

  /// All engines of one path, memory and block size stand next to each other, so that they see the same machine.
  std::vector<Point> points() const {
    std::vector<Point> all;
    for (const std::string& path : options_.paths)
      for (const MemoryKind memory : options_.memories)
        for (const Shape& shape : options_.shapes)
          for (const Contender& contender : contenders(path, far_.is_same_host()))
            all.push_back({path, memory, shape, contender});
    return all;
  }

  Result<void> measure_all() {
    const std::vector<Point> all = points();
    Progress progress(all.size());
    for (const Point& point : all) {
      const std::string name = point.contender.engine + " " + point.contender.setting;
      if (!missing_.contains(point.contender.engine)) {
        progress.begin_step(fmt::format("{}, path {}, {} memory, {}", name, point.path,
                                        point.memory == MemoryKind::kKvferry ? "kvferry" : "foreign",
                                        byte_size_text(point.shape.block_bytes)));
        Result<Measured> measured = measure(point.contender, point.path, point.memory, point.shape, options_,
                                            far_.link(), far_.host(), far_.is_same_host());
        if (!measured && (point.contender.engine == "kvferry" || measured.error().code == ErrorCode::kCancelled))
          return std::move(measured).error();
        if (measured) {
          take(point, std::move(*measured), progress);
        } else {
          missing_[point.contender.engine] = measured.error().what;
          progress.say(fmt::format("warning: {} is left out: {}", point.contender.engine, measured.error().what));
        }
      }
      progress.end_step();
    }
    return {};
  }

  void take(const Point& point, Measured measured, Progress& progress) {
    rows_.insert(rows_.end(), measured.rows.begin(), measured.rows.end());
    const std::string name = fmt::format("{} {}, path {}", point.contender.engine, point.contender.setting, point.path);
    if (!measured.describe.empty() && engines_[name] != measured.describe) {
      engines_[name] = measured.describe;
      progress.say(fmt::format("{}: {}", name, measured.describe));
    }
    const std::string memory = point.memory == MemoryKind::kKvferry ? "kvferry" : "foreign";
    const double share = static_cast<double>(measured.huge_page_bytes) /
                         static_cast<double>(point.shape.block_bytes * point.shape.num_blocks);
    if (point.contender.engine == "kvferry" && !huge_shares_.contains(memory)) {
      huge_shares_[memory] = share;
      progress.say(fmt::format("{} memory is backed by huge pages to {:.0f} %", memory, 100 * share));
    }
  }

  Result<void> write_json() const {
    if (options_.json_file.empty()) return {};
    Json rows = Json::array();
    for (const Row& row : rows_) rows.push_back(to_json(row));
    Json machine = host_facts();
    machine["huge_page_share"] = huge_shares_;
    const Json all{
        {"rows", std::move(rows)}, {"machine", std::move(machine)}, {"engines", engines_}, {"peers_missing", missing_}};
    std::ofstream file(options_.json_file);
    file << all.dump(2) << '\n';
    file.close();
    if (!file) return Error{ErrorCode::kUnavailable, fmt::format("can't write {}", options_.json_file)};
    return {};
  }

  const TransferOptions& options_;
  FarSide far_;
  std::vector<Row> rows_;
  std::map<std::string, std::string> engines_;
  std::map<std::string, std::string> missing_;  // engine: why
  std::map<std::string, double> huge_shares_;
};

}  // namespace

Result<void> run_driver(const TransferOptions& options) {
  catch_interrupts();
  return Driver(options).run();
}

}  // namespace kvferry::bench
