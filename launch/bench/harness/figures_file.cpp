#include "launch/bench/harness/figures_file.h"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>

#include "launch/bench/harness/bench_venv.h"

namespace kvferry::bench {

Result<void> write_json(const std::string& name, const nlohmann::json& figures) {
  if (name.empty()) return {};
  std::ofstream file(name);
  file << figures.dump(2) << '\n';
  file.close();
  if (!file) return Error{ErrorCode::kUnavailable, fmt::format("can't write {}", name)};
  return {};
}

Result<void> draw(const std::string& name, const std::string& kind, const nlohmann::json& figures, const Say& say) {
  if (name.empty()) return {};
  Result<void> done = ensure_installed("plot", say);
  const std::string file = name + ".json";
  if (done) done = write_json(file, figures);
  if (done) done = run_to_end(script_command("plots.py", {kind, file, name}));
  ::unlink(file.c_str());
  if (!done && done.error().code == ErrorCode::kCancelled) return done;
  if (!done) say(fmt::format("warning: no plot: {}", done.error().what));
  return {};
}

}  // namespace kvferry::bench
