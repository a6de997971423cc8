// Many small blocks in one message: how it is laid out, what was asked in them, and how the other side serves it.
// Private to this folder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/transfer_table.h"
#include "transport/ucx/messages.h"

namespace kvferry::ucx {

/// A message with bytes behind it: the length of the encoded message, the message, the bytes.
template <class Message>
std::string begin_packed(const Message& message, std::uint64_t payload_bytes) {
  const std::string head = encode(message);
  const std::uint64_t head_bytes = head.size();
  std::string packed;
  packed.reserve(sizeof(head_bytes) + head.size() + payload_bytes);
  packed.append(reinterpret_cast<const char*>(&head_bytes), sizeof(head_bytes));
  return packed.append(head);
}

inline std::span<const std::byte> as_bytes(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

template <class Message>
Result<std::pair<Message, std::string_view>> read_packed(std::string_view packed, std::string_view what_it_is) {
  std::uint64_t head_bytes = 0;
  if (packed.size() < sizeof(head_bytes)) return Error{ErrorCode::kCorrupt, "malformed message: too short"};
  packed.copy(reinterpret_cast<char*>(&head_bytes), sizeof(head_bytes));
  packed.remove_prefix(sizeof(head_bytes));
  if (head_bytes > packed.size()) return Error{ErrorCode::kCorrupt, "malformed message: too short"};
  Result<Message> message = decode<Message>(packed.substr(0, head_bytes), what_it_is);
  if (!message) return std::move(message).error();
  return std::pair(std::move(*message), packed.substr(head_bytes));
}

/// Does what a peer asks with our memory; the answer is a BlocksAnswer with its bytes, ready to be sent.
std::string serve(TransferTable& transfer_table, const BlocksMessage& message, std::string_view payload, bool& is_served);
/// The answer to one that was not served.
std::string refuse(const BlocksMessage& message, ErrorCode code, std::string what);

/// One run of bytes of a message, at the initiator.
struct Piece {
  std::size_t copy = 0;  // of the transfer's copies
  std::byte* local = nullptr;
  std::uint64_t bytes = 0;
};

class UcxTransfer;

/// What transfers have asked and not heard back about, by token. Progress thread only.
class AskedBook {
 public:
  struct Asked {
    UcxTransfer* transfer = nullptr;
    std::vector<Piece> pieces;
  };
  std::uint64_t next_token() { return ++num_tokens_; }
  void add(std::uint64_t token, Asked asked) { asked_.emplace(token, std::move(asked)); }
  /// Nothing when nobody waits for it any more.
  std::optional<Asked> take(std::uint64_t token) {
    auto found = asked_.extract(token);
    return found ? std::optional(std::move(found.mapped())) : std::nullopt;
  }
  void forget(const UcxTransfer* transfer) {
    std::erase_if(asked_, [&](const auto& entry) { return entry.second.transfer == transfer; });
  }

 private:
  std::uint64_t num_tokens_ = 0;
  std::unordered_map<std::uint64_t, Asked> asked_;
};

}  // namespace kvferry::ucx
