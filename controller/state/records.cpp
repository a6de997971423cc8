#include "controller/state/records.h"

#include <cstring>
#include <type_traits>

namespace kvferry::controller {
namespace {

enum class Type : std::uint8_t {
  kHead = 1,
  kJoined = 2,
  kGone = 3,
  kPublished = 4,
  kEvicted = 5,
  kSnapshotDropped = 6,
  kImage = 7,
  kBlock = 8,
  kEnd = 9,
};

struct PublishedHead {
  std::uint64_t node = 0, sequence = 0;
  std::uint32_t num_full = 0, num_tails = 0;
  std::uint8_t mark = 0, tier = 0, is_partial = 0, zeros[5] = {};
};
struct EvictedHead {
  std::uint64_t node = 0, sequence = 0;
};
struct TailFields {  // a tail in a kPublished record
  ChunkKey key, group;
  std::uint32_t num_tokens = 0;
};
struct BlockHead {
  std::uint32_t name_bytes = 0, num_keys = 0, num_runs = 0, num_members = 0, num_sets = 0, num_tails = 0;
};

template <class T>
void put(std::string& out, std::span<const T> items) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (!items.empty()) out.append(reinterpret_cast<const char*>(items.data()), items.size_bytes());
}
template <class T>
void put(std::string& out, const T& item) {
  put(out, std::span<const T>(&item, 1));
}
/// Takes `num_items` items from the front of `in`. Returns false if there are fewer.
template <class T>
bool take(std::string_view& in, std::size_t num_items, std::vector<T>& items) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (num_items > in.size() / sizeof(T)) return false;
  items.resize(num_items);
  if (num_items > 0) std::memcpy(items.data(), in.data(), num_items * sizeof(T));
  in.remove_prefix(num_items * sizeof(T));
  return true;
}
template <class T>
bool take(std::string_view& in, T& item) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (in.size() < sizeof(T)) return false;
  std::memcpy(&item, in.data(), sizeof(T));
  in.remove_prefix(sizeof(T));
  return true;
}

/// Writes the type and length of one record: the constructor begins the record, and the destructor fills in its length.
class Record {
 public:
  Record(std::string& out, Type type) : out_(out), begin_(out.size()) {
    put(out_, type);
    put(out_, std::uint32_t{0});
  }
  Record(const Record&) = delete;
  Record& operator=(const Record&) = delete;
  ~Record() {
    const auto length = static_cast<std::uint32_t>(out_.size() - begin_ - kHeadBytes);
    std::memcpy(out_.data() + begin_ + 1, &length, sizeof length);
  }
  static constexpr std::size_t kHeadBytes = 5;

 private:
  std::string& out_;
  std::size_t begin_;
};

/// Takes the next record from a batch's body. Returns false if the record is incomplete.
bool take_record(std::string_view& body, std::uint8_t& type, std::string_view& record) {
  std::uint32_t length = 0;
  if (!take(body, type) || !take(body, length) || length > body.size()) return false;
  record = body.substr(0, length);
  body.remove_prefix(length);
  return true;
}

bool is_consistent(const TableBlock& block) {
  std::size_t num_keys = 0;
  for (const TableBlock::Run& run : block.runs) {
    if (run.set >= block.set_ends.size()) return false;
    num_keys += run.num_keys;
  }
  std::uint32_t last = 0;
  for (const std::uint32_t end : block.set_ends) {
    if (end < last || end > block.members.size()) return false;
    last = end;
  }
  const auto is_tier = [](Tier tier) { return static_cast<std::size_t>(tier) < kNumTiers; };
  return num_keys == block.keys.size() &&
         std::ranges::all_of(block.members, [&](const TableBlock::Member& member) { return is_tier(member.tier); });
}

}  // namespace

void append_head(std::string& out, const FileHead& head) {
  const Record record(out, Type::kHead);
  out += encode(head);
}

void append_joined(std::string& out, NodeId node, const NodeInfo& info, std::uint64_t next_sequence) {
  const Record record(out, Type::kJoined);
  out += encode(JoinedRecord{node, info, next_sequence});
}

void append_gone(std::string& out, NodeId node) {
  const Record record(out, Type::kGone);
  put(out, node.value);
}

void append_published(std::string& out, NodeId node, std::uint64_t sequence, SnapshotMark mark, Tier tier,
                      std::span<const ChunkEntry> chunks, bool is_partial) {
  const Record record(out, Type::kPublished);
  PublishedHead head{.node = node.value,
                     .sequence = sequence,
                     .mark = static_cast<std::uint8_t>(mark),
                     .tier = static_cast<std::uint8_t>(tier),
                     .is_partial = is_partial ? std::uint8_t{1} : std::uint8_t{0}};
  for (const ChunkEntry& chunk : chunks) ++(chunk.is_tail ? head.num_tails : head.num_full);
  put(out, head);
  // Tails come first, as in the result of wire::join_entries().
  if (head.num_tails > 0) {
    for (const ChunkEntry& chunk : chunks) {
      if (chunk.is_tail) put(out, TailFields{chunk.key, chunk.tail_group, chunk.num_tokens});
    }
  }
  const std::size_t at = out.size();
  out.resize(at + head.num_full * sizeof(ChunkKey));
  char* to = out.data() + at;
  for (const ChunkEntry& chunk : chunks) {
    if (chunk.is_tail) continue;
    std::memcpy(to, &chunk.key, sizeof chunk.key);
    to += sizeof chunk.key;
  }
}

void append_evicted(std::string& out, NodeId node, std::uint64_t sequence, std::span<const ChunkKey> keys) {
  const Record record(out, Type::kEvicted);
  put(out, EvictedHead{node.value, sequence});
  put(out, keys);
}

void append_snapshot_dropped(std::string& out, NodeId node) {
  const Record record(out, Type::kSnapshotDropped);
  put(out, node.value);
}

void append_image(std::string& out, const DirectoryImage& image) {
  const Record record(out, Type::kImage);
  out += encode(image);
}

void append_block(std::string& out, const std::string& name_space, const TableBlock& block) {
  const Record record(out, Type::kBlock);
  const auto size = [](const auto& items) { return static_cast<std::uint32_t>(items.size()); };
  put(out, BlockHead{size(name_space), size(block.keys), size(block.runs), size(block.members), size(block.set_ends),
                     size(block.tails)});
  out += name_space;
  put(out, std::span<const ChunkKey>(block.keys));
  put(out, std::span<const TableBlock::Run>(block.runs));
  put(out, std::span<const TableBlock::Member>(block.members));
  put(out, std::span<const std::uint32_t>(block.set_ends));
  put(out, std::span<const TableBlock::Tail>(block.tails));
}

void append_end(std::string& out) { const Record record(out, Type::kEnd); }

std::optional<FileHead> head_in(std::string_view body) {
  std::uint8_t type = 0;
  std::string_view record;
  if (!take_record(body, type, record) || type != static_cast<std::uint8_t>(Type::kHead)) return std::nullopt;
  Result<FileHead> head = decode<FileHead>(record, "file head");
  if (!head) return std::nullopt;
  return std::move(*head);
}

bool Replayer::replay(std::string_view body) {
  while (!body.empty()) {
    std::uint8_t type = 0;
    std::string_view record;
    if (!take_record(body, type, record) || !replay(type, record)) return false;
    ++num_records_;
  }
  return true;
}

bool Replayer::replay(std::uint8_t type, std::string_view record) {
  NodeId node;
  switch (static_cast<Type>(type)) {
    case Type::kHead: {
      const Result<FileHead> head = decode<FileHead>(record, "file head");
      if (head) state_.at_least_version(head->index_version);
      return static_cast<bool>(head);
    }
    case Type::kJoined: {
      const Result<JoinedRecord> joined = decode<JoinedRecord>(record, "joined node");
      if (!joined || joined->id == NodeId{}) return false;
      state_.replay_joined(joined->id, joined->info, joined->next_sequence);
      return true;
    }
    case Type::kGone:
      if (!take(record, node.value)) return false;
      state_.replay_gone(node);
      return true;
    case Type::kPublished: {
      PublishedHead head;
      std::vector<TailFields> tails;
      if (!take(record, head) || head.tier >= kNumTiers || head.mark > static_cast<std::uint8_t>(SnapshotMark::kEnds) ||
          !take(record, head.num_tails, tails) || !take(record, head.num_full, keys_))
        return false;
      chunks_.clear();
      for (const TailFields& tail : tails) chunks_.push_back({tail.key, tail.num_tokens, true, tail.group});
      for (const ChunkKey& key : keys_) chunks_.push_back({.key = key, .tail_group = {}});
      state_.replay_published(NodeId{head.node}, head.sequence, static_cast<SnapshotMark>(head.mark),
                              static_cast<Tier>(head.tier), chunks_, head.is_partial != 0);
      return true;
    }
    case Type::kEvicted: {
      EvictedHead head;
      if (!take(record, head) || !take(record, record.size() / sizeof(ChunkKey), keys_)) return false;
      state_.replay_evicted(NodeId{head.node}, head.sequence, keys_);
      return true;
    }
    case Type::kSnapshotDropped:
      if (!take(record, node.value)) return false;
      state_.replay_snapshot_dropped(node);
      return true;
    case Type::kImage: {
      const Result<DirectoryImage> image = decode<DirectoryImage>(record, "image of nodes");
      if (image) state_.begin_reload(*image);
      return static_cast<bool>(image);
    }
    case Type::kBlock: {
      BlockHead head;
      std::vector<char> name;
      if (!take(record, head) || !take(record, head.name_bytes, name) || !take(record, head.num_keys, block_.keys) ||
          !take(record, head.num_runs, block_.runs) || !take(record, head.num_members, block_.members) ||
          !take(record, head.num_sets, block_.set_ends) || !take(record, head.num_tails, block_.tails) ||
          !is_consistent(block_))
        return false;
      state_.reload({name.begin(), name.end()}, block_);
      return true;
    }
    case Type::kEnd:
      state_.end_blocks();
      has_end_ = true;
      return true;
  }
  return true;  // skips a record of an unknown type: a newer release wrote it, and readers may ignore it
}

}  // namespace kvferry::controller
