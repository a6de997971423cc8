#include "transport/base/net/derived_keys.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>

#include "transport/base/check.h"

namespace kvferry::net {
namespace {

Bytes32 public_of(int kind, const Bytes32& secret) {
  Bytes32 made{};
  std::size_t num_bytes = made.size();
  EVP_PKEY* const key = ::EVP_PKEY_new_raw_private_key(kind, nullptr, secret.data(), secret.size());
  const bool is_made = key != nullptr && ::EVP_PKEY_get_raw_public_key(key, made.data(), &num_bytes) == 1;
  ::EVP_PKEY_free(key);
  KVFERRY_CHECK(is_made && num_bytes == made.size(), "OpenSSL failed to compute a public key");
  return made;
}

}  // namespace

Bytes32 derive(std::string_view key, std::string_view purpose) {
  Bytes32 derived{};
  unsigned num_bytes = 0;
  const bool is_made = ::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
                              reinterpret_cast<const unsigned char*>(purpose.data()), purpose.size(), derived.data(),
                              &num_bytes) != nullptr;
  KVFERRY_CHECK(is_made && num_bytes == derived.size(), "OpenSSL failed to compute an HMAC-SHA256");
  return derived;
}

Bytes32 curve_public(const Bytes32& secret) { return public_of(EVP_PKEY_X25519, secret); }
Bytes32 certificate_public(const Bytes32& secret) { return public_of(EVP_PKEY_ED25519, secret); }

Bytes32 sha256(std::string_view text) {
  Bytes32 hash{};
  unsigned num_bytes = 0;
  const bool is_made = ::EVP_Digest(text.data(), text.size(), hash.data(), &num_bytes, ::EVP_sha256(), nullptr) == 1;
  KVFERRY_CHECK(is_made && num_bytes == hash.size(), "OpenSSL failed to compute a SHA-256 digest");
  return hash;
}

std::optional<std::string> bytes_of_hex(std::string_view hex) {
  const auto digit = [](char letter) {
    return letter >= '0' && letter <= '9' ? letter - '0' : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
  };
  std::string bytes;
  for (std::size_t at = 0; at + 1 < hex.size(); at += 2) {
    const int high = digit(hex[at]), low = digit(hex[at + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes += static_cast<char>(high * 16 + low);
  }
  if (hex.size() % 2 != 0) return std::nullopt;
  return bytes;
}

std::optional<Bytes32> bytes32_of_hex(std::string_view hex) {
  const std::optional<std::string> bytes = bytes_of_hex(hex);
  Bytes32 made{};
  if (!bytes || bytes->size() != made.size()) return std::nullopt;
  std::copy(bytes->begin(), bytes->end(), made.begin());
  return made;
}

}  // namespace kvferry::net
