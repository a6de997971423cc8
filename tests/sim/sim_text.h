// Defines which tokens the simulated model generates, and its KV. A KV cell holds a stamp, the hash of all tokens up to
// its position, so that attending to a wrong or stale cell is noticed at once. The next token follows from the last
// stamp.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "connector/core/plan.h"
#include "transport/base/chunk_key.h"

namespace kvferry::sim {

using Stamp = std::uint64_t;

/// A simulated engine violated a promise. The message starts with the name of the promise.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Stamp root_stamp(const std::string& extras);
Stamp next_stamp(Stamp before, std::int32_t token);
/// Returns the token that the model generates after a prefix with this stamp.
std::int32_t next_token(Stamp prefix);
constexpr bool is_stop(std::int32_t token) { return token % 31 == 0; }

/// A request's prompt and all tokens that the model will generate. stamps[p] is the stamp of tokens[0 .. p].
struct Text {
  std::vector<std::int32_t> tokens;
  std::vector<Stamp> stamps;
};
/// Returns the text with max_tokens tokens after the prompt, or with fewer if `stops` and there is a stop token.
Text say(const std::vector<std::int32_t>& prompt, std::uint32_t max_tokens, bool stops, const std::string& extras);

/// Knows all stamps of all texts, and the text of each published key, so that chunks can be checked when they are
/// published.
class StampBook {
 public:
  void learn(const Text& text, const std::string& extras);
  /// Throws Broken unless `stamps` (0: left out) are consecutive in one text, and equal to earlier stamps of the same
  /// key.
  void check_chunk(const ChunkKey& key, const std::vector<Stamp>& stamps);
  /// Returns the stamps of a key that was published; nullptr if it never was.
  const std::vector<Stamp>* find(const ChunkKey& key) const;

 private:
  std::unordered_map<Stamp, Stamp> before_;
  std::unordered_map<ChunkKey, std::vector<Stamp>> chunks_;
};

}  // namespace kvferry::sim
