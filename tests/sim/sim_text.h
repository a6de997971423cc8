// What the simulated model says and what its KV looks like. A KV cell holds a stamp, the hash of all tokens up to its
// position, so that attending to a wrong or stale cell is seen at once; the next token follows from the last stamp.
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

/// A simulated engine saw what must never happen. The message starts with the name of the promise that it breaks.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

Stamp root_stamp(const std::string& extras);
Stamp next_stamp(Stamp before, std::int32_t token);
/// The token that the model says after a prefix with this stamp.
std::int32_t next_token(Stamp prefix);
constexpr bool is_stop(std::int32_t token) { return token % 31 == 0; }

/// A request's whole truth: its prompt and all that the model will say. stamps[p] is of tokens[0 .. p].
struct Text {
  std::vector<std::int32_t> tokens;
  std::vector<Stamp> stamps;
};
/// Says max_tokens tokens after the prompt, or fewer where `stops` and a stop token was said.
Text say(const std::vector<std::int32_t>& prompt, std::uint32_t max_tokens, bool stops, const std::string& extras);

/// Every stamp that is some text's, and what each published key stands for: chunks are checked as they are published.
class StampBook {
 public:
  void learn(const Text& text, const std::string& extras);
  /// Throws Broken unless `stamps` are neighbours in one text and equal to what the key stood for before.
  void check_chunk(const ChunkKey& key, const std::vector<Stamp>& stamps);

 private:
  std::unordered_map<Stamp, Stamp> before_;
  std::unordered_map<ChunkKey, std::vector<Stamp>> chunks_;
};

}  // namespace kvferry::sim
