// What `kvferry top` and `kvferry status` print of each node. Pure: no I/O. Texts come from other hosts, and hold only
// printable ASCII here.
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
  double fill = 0;            // share of the pool's slots, from 0 to 1
  std::optional<double> hit;  // share of the tokens that the engine's own cache lacked; empty: no tokens lately
  double in_gb_per_s = 0, out_gb_per_s = 0;
  std::uint64_t transfers = 0, load = 0, num_failures = 0;
  std::uint64_t ago_ms = 0;  // time since the node was lost, or since its last message
  std::optional<std::uint64_t> failed_ago_ms;
  std::string failure;  // its last failure as a sentence; empty: none
};

std::string shown_name(const controller::NodeStatus& node);
/// [endpoint] shown name of the node, lost ones included.
NodeNames names_of(const controller::Status& status);
/// The shown names of the nodes between which a path's bytes go; of a node without a name its endpoint.
struct PathEnds {
  std::string from, to;
};
PathEnds ends_of(const controller::NodeStatus& reporter, const controller::PathReport& path, const NodeNames& names);
/// Returns the registered nodes in the order of the status, then the lost ones.
std::vector<NodeRow> node_rows(const controller::Status& status);

/// The keys by which sort_rows() sorts: "name" ascending, all others with the largest number first.
inline constexpr std::string_view kSortKeys[] = {"name", "pool", "hit", "in", "out", "transfers", "load", "failure"};
void sort_rows(std::vector<NodeRow>& rows, std::string_view key);

/// Returns the lines of a frame of `kvferry top`, each at most `width` columns, without colours.
std::vector<std::string> top_lines(const controller::Status& status, const std::vector<NodeRow>& rows,
                                   const std::string& endpoint, std::size_t width);
nlohmann::json rows_json(const std::vector<NodeRow>& rows);

using Table = std::vector<std::vector<std::string>>;  // [row][column]; the first row has the heads
std::string table_text(const Table& table);

std::string age_text(std::uint64_t ms);       // Returns a text such as "7 s", "12 min" or "3 h".
std::string bytes_text(std::uint64_t bytes);  // Returns a text such as "1.50 GiB".
std::string share_text(double share);         // "45%"

}  // namespace kvferry::cli
