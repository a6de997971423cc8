#include "launch/bench/transfer/rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "launch/bench/harness/flags.h"

namespace kvferry::bench {
namespace {

/// Returns kvferry's first row of the same path, memory, direction, block size and number of blocks, nullptr if there
/// is none.
const Row* kvferrys(const std::vector<Row>& rows, const Row& row) {
  const auto found = std::find_if(rows.begin(), rows.end(), [&](const Row& other) {
    return other.engine == "kvferry" && other.path == row.path && other.memory == row.memory && other.op == row.op &&
           other.block_bytes == row.block_bytes && other.num_blocks == row.num_blocks;
  });
  return found == rows.end() ? nullptr : &*found;
}

std::string group_of(const Row& row) { return fmt::format("{}, path {}, {} memory", row.op, row.path, row.memory); }

std::string name_of(const Row& row) { return fmt::format("{} {}", row.engine, row.setting); }

}  // namespace

std::string table_of(const std::vector<Row>& rows) {
  std::string text;
  std::size_t width = std::string_view("engine").size();
  for (const Row& row : rows) width = std::max(width, name_of(row).size());
  std::vector<std::string> groups;
  for (const Row& row : rows) {
    if (std::find(groups.begin(), groups.end(), group_of(row)) == groups.end()) groups.push_back(group_of(row));
  }
  for (const std::string& group : groups) {
    text += fmt::format("\n{}\n{:>8} {:>7}  {:<{}} {:>8} {:>9} {:>9} {:>9} {:>10}  {}\n", group, "block", "blocks",
                        "engine", width, "GB/s", "kvferry/", "p50 us", "p99 us", "CPU s/GiB", "verified");
    std::uint64_t last_bytes = 0;
    for (const Row& row : rows) {
      if (group_of(row) != group) continue;
      const Row* own = kvferrys(rows, row);
      const bool has_ratio = own != nullptr && own != &row && row.gb_per_s > 0;
      const double times = row.of_first > 0 ? 1 / row.of_first : has_ratio ? own->gb_per_s / row.gb_per_s : 0;
      text += fmt::format("{:>8} {:>7}  {:<{}} {:>8.2f} {:>9} {:>9.2f} {:>9.2f} {:>10.3f}  {}\n",
                          row.block_bytes == last_bytes ? "" : byte_size_text(row.block_bytes),
                          row.block_bytes == last_bytes ? "" : std::to_string(row.num_blocks), name_of(row), width,
                          row.gb_per_s, has_ratio ? fmt::format("{:.2f}x", times) : "", row.latency_us_p50,
                          row.latency_us_p99, row.cpu_s_per_gib, row.verified ? "yes" : "NO");
      last_bytes = row.block_bytes;
    }
  }
  return text;
}

}  // namespace kvferry::bench
