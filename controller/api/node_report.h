// What a node tells the controller about its pool, transfers and failures, for people, e.g. in `kvferry top` or on the
// status page. Of all decisions of the controller only the answer to POST /pair depends on a report, by its
// `weights_epoch`. A report is not kept on disk.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/base/result.h"
#include "transport/base/wire.h"

namespace kvferry::controller {

/// The transfers with one peer in one direction. A node remembers the 64 pairs of peer and direction that were used
/// last. The sums begin when the node begins to remember the pair.
struct PathReport {
  std::string peer{};            // the peer's endpoint
  std::string path{};            // name of the last known path ("shm", "tcp", "ucx/tcp"); empty: unknown
  bool is_push = false;          // true: this node sent chunks to the peer; false: it pulled chunks from the peer
  std::uint64_t bytes = 0;       // bytes moved
  std::uint64_t num_failed = 0;  // chunks that did not arrive
  double gb_per_s = 0;           // speed in GB/s, as a mean of the last seconds
  // Speed of the last transfer that moved bytes. The time of a push includes waits for KV that the model has not
  // computed yet.
  double last_gb_per_s = 0;
  // Limit of the path, as known at the last transfer: its measured speed, or the speed of the fastest transfer if that
  // is higher; 0: not known.
  double limit_gb_per_s = 0;
  double best_gb_per_s = 0;  // speed of the fastest of the last large pulls; 0: there were too few to judge the path
  // The memory that the last transfer used: "GPU to GPU" or "host slots". For a pull, a reason may follow why host
  // slots were used: "host slots: REASON" or "GPU to GPU, and host slots: REASON". Empty: the node's release does not
  // report the memory.
  std::string memory{};
  KVFERRY_FIELDS(peer, path, is_push, bytes, num_failed, gb_per_s, last_gb_per_s, limit_gb_per_s, best_gb_per_s,
                 memory);
};

struct FailureReport {
  std::string what{};        // the reason, as a sentence without a full stop
  std::string peer{};        // the other node's endpoint; empty: no other node took part
  std::uint64_t ago_ms = 0;  // time from the failure to the report
  std::string cause{};       // name of the cause with which `what` begins, such as "no_answer"; empty: an older release
  KVFERRY_FIELDS(what, peer, ago_ms, cause);
};

/// A prefix of prompts that arrived in the last minutes.
struct PrefixReport {
  std::string chunk{};    // first digits of the key of the prefix's first chunk
  double per_minute = 0;  // number of new prompts with this prefix, a mean of the last minutes
  KVFERRY_FIELDS(chunk, per_minute);
};

struct NodeReport {
  std::uint64_t num_slots = 0, num_chunks = 0, num_pinned = 0;  // the pool: slots, chunks in them, pinned chunks
  std::uint64_t chunk_bytes = 0;                                // size of a slot in all ranks together
  std::uint64_t num_pulls = 0, num_pushes = 0;                  // transfers in progress that this node began
  double tokens = 0;                      // tokens of admitted requests in the last minutes; older ones count less
  double local_tokens = 0;                // those of `tokens` that were in the engine's own cache
  double loaded_tokens = 0;               // those of `tokens` that were to be loaded from the pool
  std::uint64_t num_failures = 0;         // number of failures since the node's start
  std::vector<PathReport> paths{};        // the paths that were used last
  std::vector<FailureReport> failures{};  // the last failures, the newest first
  std::vector<PrefixReport> prefixes{};   // the most frequent prefixes, the most frequent first
  std::uint64_t purge_id = 0;             // id of the last purge that was carried out; 0: none
  std::uint64_t num_purged = 0;           // chunks that the last purge dropped
  std::uint64_t purged_bytes = 0;         // bytes of KV in the chunks that the last purge dropped
  // The weights epoch in the keys of this node's chunks, see RequestExtras in connector/python/kvferry; empty: none.
  std::string weights_epoch{};
  KVFERRY_FIELDS(num_slots, num_chunks, num_pinned, chunk_bytes, num_pulls, num_pushes, tokens, local_tokens,
                 loaded_tokens, num_failures, paths, failures, prefixes, purge_id, num_purged, purged_bytes,
                 weights_epoch);
};

constexpr std::size_t kReportBytesMax = 8192, kReportTextMax = 200;
constexpr std::size_t kReportPathsMax = 16, kReportFailuresMax = 4, kReportPrefixesMax = 8;

/// Returns the first kReportTextMax bytes of the text, with a question mark in place of each byte that is not printable
/// ASCII. All texts in a report have this form.
std::string report_text(std::string_view text);

/// Decodes a report of a node. kCorrupt: the report is longer than kReportBytesMax, is malformed, or has more elements
/// than allowed, a text that report_text() would change, or a double that is negative, not finite or above 1e15.
Result<NodeReport> parse_report(std::string_view bytes);

}  // namespace kvferry::controller
