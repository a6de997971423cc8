// What `kvferry top` and `kvferry status` print of each node. The functions do no I/O. In texts that other hosts have
// sent, they replace all characters but printable ASCII by question marks.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "controller/api/status.h"
#include "launch/cli/explain/event_text.h"

namespace kvferry::cli {

struct NodeRow {
  std::string name, role;
  std::string state;  // "ok", "silent", "stale", "draining", "drained" or "lost"
  bool has_report = false;
  std::uint64_t chunks = 0, slots = 0, pinned = 0, chunk_bytes = 0;
  double fill = 0;  // share of the pool's slots that have a chunk, from 0 to 1
  /// Tokens of the last minutes that were to be loaded from the pool, divided by those that the engine's own cache
  /// lacked, at most 1; nullopt if the cache lacked none or the node has not reported.
  std::optional<double> hit;
  double in_gb_per_s = 0, out_gb_per_s = 0;
  std::uint64_t transfers = 0, load = 0, num_failures = 0;
  std::uint64_t ago_ms = 0;  // time since the node was lost, or since its last message
  std::optional<std::uint64_t> failed_ago_ms;
  std::string failure;  // the node's last failure as a sentence; empty: no failure is known
};

std::string shown_name(const controller::NodeStatus& node);
/// Returns the shown names of registered and of lost nodes by endpoint.
NodeNames names_of(const controller::Status& status);
/// The nodes from which and to which the bytes of a path go: shown names, or the endpoint if the status lacks the node.
struct PathEnds {
  std::string from, to;
};
PathEnds ends_of(const controller::NodeStatus& reporter, const controller::PathReport& path, const NodeNames& names);
/// Returns the registered nodes in the order of the status, then the lost ones.
std::vector<NodeRow> node_rows(const controller::Status& status);

/// The keys by which sort_rows() sorts: "name" in ascending order, "failure" with the latest failure first, all others
/// with the largest number first.
inline constexpr std::string_view kSortKeys[] = {"name", "pool", "hit", "in", "out", "transfers", "load", "failure"};
void sort_rows(std::vector<NodeRow>& rows, std::string_view key);

/// Returns the lines of one screen of `kvferry top`, each at most `width` columns wide, without colours.
std::vector<std::string> top_lines(const controller::Status& status, const std::vector<NodeRow>& rows,
                                   const std::string& endpoint, std::size_t width);
nlohmann::json rows_json(const std::vector<NodeRow>& rows);

using Table = std::vector<std::vector<std::string>>;  // rows of cells; the first row has the column headings
std::string table_text(const Table& table);

std::string age_text(std::uint64_t ms);       // Returns a text such as "7 s", "12 min" or "3 h".
std::string bytes_text(std::uint64_t bytes);  // Returns a text such as "1.50 GiB".
std::string share_text(double share);         // Returns a text such as "45%".

}  // namespace kvferry::cli
