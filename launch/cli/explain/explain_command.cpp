// The command `kvferry explain`.
#include <algorithm>
#include <memory>

#include "launch/cli/commands.h"
#include "launch/cli/controller_settings.h"
#include "launch/cli/explain/life_list.h"
#include "launch/cli/explain/life_report.h"
#include "launch/cli/explain/traced_requests.h"

namespace kvferry::cli {
namespace {

struct ExplainFlags {
  SettingFlags controller;
  LivesRequest asked;
  double timeout_s = 2;
  bool as_json = false;

  TimeNs timeout() const { return static_cast<TimeNs>(timeout_s * static_cast<double>(kSecond)); }
};

void print(const nlohmann::json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace));
}

/// Asks the nodes for the request or trace. If an answer says that the request had another id on the node that handed
/// it over, asks for that id too, because a router may choose one id for prefill and another one for decode.
std::vector<NodeAnswer> ask_all(const controller::Status& status, const ExplainFlags& flags,
                                const std::optional<net::ClusterKey>& key) {
  std::vector<NodeAnswer> answers = ask_nodes(status.nodes, flags.asked, key, flags.timeout());
  std::vector<std::string> known, sources;
  for (const NodeAnswer& node : answers)
    for (const RequestLife& life : node.lives) known.push_back(life.request);
  for (const NodeAnswer& node : answers)
    for (const RequestLife& life : node.lives)
      for (const LifeEvent& event : life.events) {
        const std::string source(event.what() == LifeKind::kArrived ? event.note.view() : "");
        if (source.empty() || std::ranges::find(known, source) != known.end()) continue;
        known.push_back(source);
        sources.push_back(source);
      }
  // A node that did not answer is not asked again, because waiting for it would take the whole timeout again.
  std::vector<controller::NodeStatus> answering;
  for (std::size_t i = 0; i < status.nodes.size(); ++i)
    if (answers[i].has_answered) answering.push_back(status.nodes[i]);
  for (const std::string& source : sources) {
    for (NodeAnswer& more : ask_nodes(answering, {source}, key, flags.timeout())) {
      more.has_answered = true;  // so that the report names only nodes without an answer to the first question
      if (!more.lives.empty()) answers.push_back(std::move(more));
    }
  }
  return answers;
}

Result<void> list(const LifeReport& report, const ExplainFlags& flags) {
  const std::uint32_t num = std::max(flags.asked.num_newest, flags.asked.num_slowest);
  const std::vector<ListedLife> lives = list_lives(report, num, flags.asked.num_slowest > 0);
  if (flags.as_json)
    print(list_json(lives));
  else
    fmt::print("{}", list_text(lives));
  for (const std::string& sentence : report.missing) fmt::print(stderr, "missing: {}\n", sentence);
  return {};
}

/// Prints a report of each request of the trace.
Result<void> explain_trace(const std::vector<NodeAnswer>& answers, const ExplainFlags& flags) {
  const std::vector<std::vector<NodeAnswer>> requests = split_by_request(answers);
  nlohmann::json all = nlohmann::json::array();
  std::string text =
      fmt::format("trace {}: {} request{}\n", flags.asked.trace, requests.size(), requests.size() == 1 ? "" : "s");
  for (const std::vector<NodeAnswer>& one : requests) {
    const LifeReport report = make_report(one);
    const std::string& request = report.lives.at(0).request;
    if (flags.as_json)
      all.push_back(report_json(report, request));
    else
      text += "\n" + report_text(report, request);
  }
  if (flags.as_json)
    print({{"trace", flags.asked.trace}, {"requests", std::move(all)}});
  else
    fmt::print("{}", text);
  return {};
}

/// Returns the error for a request or trace that no node has.
Error not_found(const LifeReport& report, const ExplainFlags& flags, std::size_t num_nodes) {
  const bool is_trace = !flags.asked.trace.empty();
  return Error{
      ErrorCode::kNotFound,
      fmt::format("none of {} nodes has a request {}'{}': {}, its node may be gone, or its events were "
                  "overwritten{}{}",
                  num_nodes, is_trace ? "of the trace " : "", is_trace ? flags.asked.trace : flags.asked.request,
                  is_trace ? "the servers may have got no traceparent, which launch/proxy sends"
                           : "the id may be wrong (--last 16 lists ids; --trace takes the id of a trace)",
                  report.missing.empty() ? "" : "; ", fmt::join(report.missing, "; "))};
}

Result<void> run(const ExplainFlags& flags) {
  const auto [endpoint, key] = KVFERRY_TRY(controller_of(flags.controller));
  const controller::Status status = KVFERRY_TRY(controller::fetch_status(endpoint, kControllerTimeoutMs, key));
  const std::string& request = flags.asked.request;
  if (request.empty() && flags.asked.trace.empty())
    return list(make_report(ask_nodes(status.nodes, flags.asked, key, flags.timeout())), flags);
  const std::vector<NodeAnswer> answers = ask_all(status, flags, key);
  const LifeReport report = make_report(answers);
  if (report.lives.empty()) return not_found(report, flags, status.nodes.size());
  if (request.empty()) return explain_trace(answers, flags);
  if (flags.as_json)
    print(report_json(report, request));
  else
    fmt::print("{}", report_text(report, request));
  return {};
}

}  // namespace

Run add_explain_command(CLI::App& app) {
  auto flags = std::make_shared<ExplainFlags>();
  CLI::App* command = app.add_subcommand(
      "explain",
      "Show one request's life on all nodes: waits, transfers, preemptions, and why tokens were computed again. The "
      "nodes are asked directly, so this host must reach their ports, as other nodes do.");
  add_controller_option(*command, flags->controller);
  const std::uint32_t most = FlightRecorder::kLivesMax;
  const std::vector<CLI::Option*> all{
      command
          ->add_option("REQUEST", flags->asked.request,
                       "The request's id, as the proxy's log, the client's X-Request-Id or the answer has it; the "
                       "prefix and suffix that vLLM adds may be left out")
          ->check([](const std::string& id) {
            return id.empty() ? "the id is empty; --last 16 lists the ids of requests" : "";
          }),
      command
          ->add_option("--trace", flags->asked.trace,
                       fmt::format("Show the requests of this W3C trace, the newest {} on each node: a trace id, 32 "
                                   "hexadecimal digits, or a whole traceparent",
                                   most))
          ->check([](const std::string& text) {
            if (!trace_id_in(text).empty()) return std::string();
            return fmt::format(
                "'{}' is neither a trace id (32 hexadecimal digits, lower case and not all zero) nor a traceparent, "
                "which has these digits between '00-' and '-'",
                text);
          }),
      command->add_option("--last", flags->asked.num_newest, "Number of requests to list: those that arrived last")
          ->check(number_between(1u, most)),
      command->add_option("--slowest", flags->asked.num_slowest, "Number of requests to list: those that took longest")
          ->check(number_between(1u, most))};
  command->callback([all, flags] {
    if (std::ranges::count_if(all, [](const CLI::Option* one) { return !one->empty(); }) != 1)
      throw CLI::RequiredError("exactly one of REQUEST, --trace, --last and --slowest");
    flags->asked.trace = trace_id_in(flags->asked.trace);
  });
  command->add_option("--timeout", flags->timeout_s, "Time to wait for the nodes' answers, in seconds")
      ->capture_default_str()
      ->check(number_between(0.1, 60.0));
  command->add_flag("--json", flags->as_json, "Print one JSON object");
  return [flags] { return run(*flags); };
}

}  // namespace kvferry::cli
