#include "launch/bench/harness/figures_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>

#include "launch/bench/harness/bench_venv.h"
#include "launch/bench/harness/failure.h"

namespace kvferry::bench {

void write_json(const std::string& name, const nlohmann::json& figures) {
  if (name.empty()) return;
  std::ofstream file(name);
  file << figures.dump(2) << '\n';
  file.close();
  if (!file) throw Failure({ErrorCode::kUnavailable, fmt::format("can't write {}", name)});
}

void draw(const std::string& name, const std::string& kind, const nlohmann::json& figures, const Say& say) {
  if (name.empty()) return;
  const std::string file = name + ".json";
  const Result<void> done = attempt([&] {
    ensure_installed("plot", say);
    write_json(file, figures);
    run_to_end(script_command("plots.py", {kind, file, name}));
  });
  ::unlink(file.c_str());
  if (!done && done.error().code == ErrorCode::kCancelled) need(done);
  if (!done) say(fmt::format("warning: no plot: {}", done.error().what));
}

}  // namespace kvferry::bench
