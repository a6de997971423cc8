// The lookups of EngineIndex: which holders have how many leading blocks of a prompt.
#include "controller/engines/block_chain.h"
#include "controller/engines/engine_index.h"

namespace kvferry::controller {
namespace {

std::uint8_t bit_of(Tier tier) { return static_cast<std::uint8_t>(1U << static_cast<unsigned>(tier)); }

}  // namespace

/// Looks up the keys of chain_ in the index. Fills `matches` with an entry for each holder of the first block, which
/// says how many leading blocks that holder has in each tier.
void EngineIndex::match(std::vector<EngineMatch>& matches) {
  matches.clear();
  walkers_.clear();
  std::size_t num_walked = 0;
  const auto stop = [&](Walker& walker, std::uint8_t alone, std::uint8_t together, std::size_t at) {
    EngineMatch& match = matches[walker.match];
    for (unsigned tier = 0; tier < kNumTiers; ++tier) {
      if (walker.alone & ~alone & 1U << tier) match.in_tier[tier] = static_cast<std::uint32_t>(at);
      if (walker.together & ~together & 1U << tier) match.up_to_tier[tier] = static_cast<std::uint32_t>(at);
    }
    walker.alone &= alone;
    walker.together &= together;
  };
  index_.for_each_run(chain_, [&](std::size_t first, std::size_t end, std::span<const Placement> placements) {
    if (first == 0) {
      for (const Placement placement : placements) {
        if (!index_.is_visible(placement.node())) continue;
        if (!walkers_.empty() && walkers_.back().node == placement.node()) continue;
        walkers_.push_back({placement.node(), 0xf, 0xf, static_cast<std::uint32_t>(matches.size())});
        matches.push_back({.holder = holder_of_node_[placement.node()]});
      }
    }
    std::size_t num_left = 0;
    auto at = placements.begin();  // placements are sorted by node, like walkers_
    for (Walker walker : walkers_) {
      std::uint8_t alone = 0;
      while (at != placements.end() && at->node() < walker.node) ++at;
      for (; at != placements.end() && at->node() == walker.node; ++at) alone |= bit_of(at->tier());
      std::uint8_t together = 0;  // bits of the fastest tier in `alone` and of all slower tiers
      for (unsigned tier = 0; tier < kNumTiers; ++tier)
        together |= static_cast<std::uint8_t>((alone & ((2U << tier) - 1)) != 0 ? 1U << tier : 0);
      stop(walker, alone, together, first);
      if (walker.together != 0) walkers_[num_left++] = walker;
    }
    walkers_.resize(num_left);
    num_walked = end;
    return num_left > 0;
  });
  for (Walker& walker : walkers_) stop(walker, 0, 0, num_walked);
}

void EngineIndex::match_tokens(std::span<const std::uint32_t> tokens, const PromptSalt& salt,
                               std::vector<EngineMatch>& matches) {
  flush();
  const std::size_t size = options_.block_size;
  chain_.resize(tokens.size() / size);
  ShortKey key = root_block_key(options_.index.seed, salt.lora_name, salt.lora_id);
  for (std::size_t i = 0; i < chain_.size(); ++i) {
    key = next_block_key(key, tokens.subspan(i * size, size), i == 0 ? salt_extras(salt.cache_salt) : 0);
    chain_[i] = key;
  }
  match(matches);
}

void EngineIndex::match_hashes(std::span<const ShortKey> hashes, std::vector<EngineMatch>& matches) {
  flush();
  chain_.clear();
  for (const ShortKey hash : hashes) {
    const ShortKey* key = keys_of_.find(hash);
    if (key == nullptr) break;
    chain_.push_back(*key);
  }
  match(matches);
}

}  // namespace kvferry::controller
