#include "controller/api/node_report.h"

#include <algorithm>

#include "transport/base/printable.h"

namespace kvferry::controller {
namespace {

constexpr double kNumberMax = 1e15;

bool is_number(double number) { return number >= 0 && number <= kNumberMax; }
bool is_text(std::string_view text) { return text == report_text(text); }

/// Returns what is wrong with a decoded report, or an empty text if it is valid.
std::string wrong_part(const NodeReport& report) {
  if (report.paths.size() > kReportPathsMax || report.failures.size() > kReportFailuresMax ||
      report.prefixes.size() > kReportPrefixesMax)
    return fmt::format("it lists {} paths, {} failures and {} prefixes; at most {}, {} and {} are allowed",
                       report.paths.size(), report.failures.size(), report.prefixes.size(), kReportPathsMax,
                       kReportFailuresMax, kReportPrefixesMax);
  const bool has_numbers =
      is_number(report.tokens) && is_number(report.local_tokens) && is_number(report.loaded_tokens) &&
      std::ranges::all_of(report.paths,
                          [](const PathReport& one) {
                            return is_number(one.gb_per_s) && is_number(one.last_gb_per_s) &&
                                   is_number(one.limit_gb_per_s) && is_number(one.best_gb_per_s);
                          }) &&
      std::ranges::all_of(report.prefixes, [](const PrefixReport& one) { return is_number(one.per_minute); });
  if (!has_numbers)
    return fmt::format(
        "one of these is not between 0 and {:g}: the number of tokens ({:g}), of those in the engine's cache ({:g}) or "
        "to be loaded ({:g}), a path's speed in GB/s, or a prefix's number of prompts a minute",
        kNumberMax, report.tokens, report.local_tokens, report.loaded_tokens);
  const bool has_texts =
      is_text(report.weights_epoch) &&
      std::ranges::all_of(
          report.paths,
          [](const PathReport& one) { return is_text(one.peer) && is_text(one.path) && is_text(one.memory); }) &&
      std::ranges::all_of(
          report.failures,
          [](const FailureReport& one) { return is_text(one.what) && is_text(one.peer) && is_text(one.cause); }) &&
      std::ranges::all_of(report.prefixes, [](const PrefixReport& one) { return is_text(one.chunk); });
  if (has_texts) return "";
  return fmt::format(
      "the weights epoch, or a text about a path, a failure or a prefix, is too long or not printable; up to {} bytes "
      "of printable "
      "ASCII are allowed",
      kReportTextMax);
}

}  // namespace

std::string report_text(std::string_view text) { return printable(text, kReportTextMax); }

Result<NodeReport> parse_report(std::string_view bytes) {
  if (bytes.size() > kReportBytesMax)
    return Error{ErrorCode::kCorrupt,
                 fmt::format("a node's report has {} bytes; at most {} are allowed", bytes.size(), kReportBytesMax)};
  NodeReport report = KVFERRY_TRY(decode<NodeReport>(bytes, "report of a node"));
  if (const std::string wrong = wrong_part(report); !wrong.empty())
    return Error{ErrorCode::kCorrupt, fmt::format("a node's report is not valid: {}", wrong)};
  return report;
}

}  // namespace kvferry::controller
