#include <algorithm>
#include <csignal>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "launch/cli/commands.h"
#include "transport/base/versions.h"

namespace kvferry::cli {
namespace {

int fail(int exit_status, const std::string& what) {
  fmt::print(stderr, "kvferry: {}\n", what);
  return exit_status;
}

int run(int argc, const char* const* argv) {
  CLI::App app("kvferry moves KV cache between the machines of an LLM serving cluster.", "kvferry");
  app.set_version_flag("--version", fmt::format("kvferry {}", kvferry::version()));
  const std::pair<std::string, Run> commands[] = {
      {"bench", add_bench_command(app)},           {"clear", add_clear_command(app)},
      {"controller", add_controller_command(app)}, {"doctor", add_doctor_command(app)},
      {"drain", add_drain_command(app)},           {"explain", add_explain_command(app)},
      {"keygen", add_keygen_command(app)},         {"purge", add_purge_command(app)},
      {"quota", add_quota_command(app)},           {"status", add_status_command(app)},
      {"token", add_token_command(app)},           {"top", add_top_command(app)},
  };
  std::vector<std::string> names;
  for (const auto& [name, command] : commands) names.push_back(name);
  const std::string allowed = fmt::format("allowed: {} (see kvferry --help)", fmt::join(names, ", "));

  if (argc < 2) return fail(2, "a command is missing; " + allowed);
  const std::string first = argv[1];
  if (!first.starts_with('-') && std::find(names.begin(), names.end(), first) == names.end())
    return fail(2, fmt::format("unknown command '{}'; {}", first, allowed));
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& asked) {
    return app.exit(asked);  // the user gave --help or --version
  } catch (const CLI::ParseError& wrong) {
    const std::vector<CLI::App*> chosen = app.get_subcommands();
    return fail(
        2, fmt::format("{} (see kvferry {}--help)", wrong.what(), chosen.empty() ? "" : chosen[0]->get_name() + " "));
  }
  for (const auto& [name, command] : commands) {
    if (!app.got_subcommand(name)) continue;
    const Result<void> done = command();
    if (done) return 0;
    return fail(done.error().code == ErrorCode::kInvalidArgument ? 2 : 1, done.error().what);
  }
  return fail(2, "a command is missing; " + allowed);
}

}  // namespace
}  // namespace kvferry::cli

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a write beyond the file size limit then only fails, and does not end this process
  try {
    return kvferry::cli::run(argc, argv);
  } catch (const std::exception& failure) {
    return kvferry::cli::fail(1, fmt::format("an unexpected error ended this command: {}", failure.what()));
  }
}
