#include "transport/base/chunk_key.h"

#include <openssl/evp.h>

#include <memory>

#include "transport/base/check.h"
#include "transport/base/printable.h"

namespace kvferry {
namespace {

// The first byte that is hashed. It makes a root key, a chunk key and a tail group key differ even if all other inputs
// are equal.
enum class Domain : std::uint8_t { kRoot = 1, kChunk = 2, kTailGroup = 3 };

class Sha256 {
 public:
  explicit Sha256(Domain domain) {
    // Fetching the algorithm by name costs more than hashing a chunk, so it is done once per process.
    static EVP_MD* const md = EVP_MD_fetch(nullptr, "SHA256", nullptr);
    thread_local const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> ctx(EVP_MD_CTX_new(), EVP_MD_CTX_free);
    ctx_ = ctx.get();
    KVFERRY_CHECK(md != nullptr && ctx_ != nullptr && EVP_DigestInit_ex2(ctx_, md, nullptr) == 1,
                  "OpenSSL failed to begin a SHA-256 digest: it lacks SHA-256 or memory");
    update(&domain, sizeof domain);
  }
  void update(const void* data, std::size_t size) {
    KVFERRY_CHECK(EVP_DigestUpdate(ctx_, data, size) == 1, "OpenSSL failed to add {} bytes to a SHA-256 digest", size);
  }
  /// Hashes the length first, so that ("ab", "c") and ("a", "bc") differ.
  void update_string(std::string_view text) {
    const std::uint64_t size = text.size();
    update(&size, sizeof size);
    update(text.data(), text.size());
  }
  ChunkKey finish() {
    std::array<std::uint8_t, 32> digest;
    KVFERRY_CHECK(EVP_DigestFinal_ex(ctx_, digest.data(), nullptr) == 1, "OpenSSL failed to finish a SHA-256 digest");
    ChunkKey key;
    std::memcpy(key.bytes.data(), digest.data(), key.bytes.size());
    return key;
  }

 private:
  EVP_MD_CTX* ctx_ = nullptr;
};

ChunkKey key_of(Domain domain, const ChunkKey& parent, std::span<const std::int32_t> tokens, std::string_view extras) {
  Sha256 sha(domain);
  sha.update(parent.bytes.data(), parent.bytes.size());
  sha.update_string(extras);
  sha.update(tokens.data(), tokens.size_bytes());
  return sha.finish();
}

}  // namespace

std::string ChunkKey::hex() const { return hex_of({reinterpret_cast<const char*>(bytes.data()), bytes.size()}); }

ChunkKey root_key(std::string_view fingerprint, std::string_view extras) {
  Sha256 sha(Domain::kRoot);
  sha.update_string(fingerprint);
  sha.update_string(extras);
  return sha.finish();
}

ChunkKey chunk_key(const ChunkKey& parent, std::span<const std::int32_t> tokens, std::string_view extras) {
  return key_of(Domain::kChunk, parent, tokens, extras);
}

ChunkKey tail_group_key(const ChunkKey& parent, std::span<const std::int32_t> first_tokens, std::string_view extras) {
  KVFERRY_CHECK(first_tokens.size() >= kTailGroupTokens,
                "the key of a tail group needs {} tokens, and the tail has only {}", kTailGroupTokens,
                first_tokens.size());
  return key_of(Domain::kTailGroup, parent, first_tokens.first(kTailGroupTokens), extras);
}

}  // namespace kvferry
