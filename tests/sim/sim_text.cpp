#include "sim_text.h"

#include <fmt/format.h>

namespace kvferry::sim {

Stamp root_stamp(const std::string& extras) {
  Stamp stamp = 0x6b76666572727921ULL;
  for (const char c : extras) stamp = next_stamp(stamp, c);
  return stamp;
}

Stamp next_stamp(Stamp before, std::int32_t token) {
  std::uint64_t z = before + 0x9e3779b97f4a7c15ULL * (static_cast<std::uint32_t>(token) + 1ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

std::int32_t next_token(Stamp prefix) { return static_cast<std::int32_t>(1 + (prefix >> 20) % 997); }

Text say(const std::vector<std::int32_t>& prompt, std::uint32_t max_tokens, bool stops, const std::string& extras) {
  Text text;
  Stamp stamp = root_stamp(extras);
  const auto add = [&](std::int32_t token) {
    stamp = next_stamp(stamp, token);
    text.tokens.push_back(token);
    text.stamps.push_back(stamp);
  };
  for (const std::int32_t token : prompt) add(token);
  for (std::uint32_t i = 0; i < max_tokens; ++i) {
    add(next_token(stamp));
    if (stops && is_stop(text.tokens.back())) break;
  }
  return text;
}

void StampBook::learn(const Text& text, const std::string& extras) {
  Stamp before = root_stamp(extras);
  for (const Stamp stamp : text.stamps) {
    before_[stamp] = before;
    before = stamp;
  }
}

void StampBook::check_chunk(const ChunkKey& key, const std::vector<Stamp>& stamps) {
  for (std::size_t i = 0; i < stamps.size(); ++i) {
    if (stamps[i] == 0) continue;
    const auto found = before_.find(stamps[i]);
    if (found == before_.end() || (i > 0 && stamps[i - 1] != 0 && found->second != stamps[i - 1]))
      throw Broken(fmt::format("saved-is-computed: published chunk {} holds wrong KV at token {}", key, i));
  }
  std::vector<Stamp>& known = chunks_.try_emplace(key, stamps).first->second;
  bool is_same = known.size() == stamps.size();
  for (std::size_t i = 0; is_same && i < stamps.size(); ++i) {
    is_same = known[i] == 0 || stamps[i] == 0 || known[i] == stamps[i];
    if (known[i] == 0) known[i] = stamps[i];
  }
  if (!is_same) throw Broken(fmt::format("saved-is-computed: published chunk {} changed its KV", key));
}

const std::vector<Stamp>* StampBook::find(const ChunkKey& key) const {
  const auto found = chunks_.find(key);
  return found == chunks_.end() ? nullptr : &found->second;
}

}  // namespace kvferry::sim
