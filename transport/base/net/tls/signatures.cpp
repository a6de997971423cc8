#include "transport/base/net/tls/signatures.h"

#include <openssl/evp.h>

#include "transport/base/check.h"
#include "transport/base/net/tls/owned_openssl.h"

namespace kvferry::net {
namespace {

constexpr std::size_t kEd25519Bytes = 64;

const unsigned char* signing_bytes(std::string_view text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

}  // namespace

std::string signature_of(const Bytes32& certificate_secret, std::string_view text) {
  const OwnedOpenSsl<EVP_PKEY> key(
      ::EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, certificate_secret.data(), certificate_secret.size()));
  const OwnedOpenSsl<EVP_MD_CTX> digest(::EVP_MD_CTX_new());
  std::string made(kEd25519Bytes, '\0');
  std::size_t num_bytes = made.size();
  const bool is_made = key != nullptr && digest != nullptr &&
                       ::EVP_DigestSignInit(digest.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
                       ::EVP_DigestSign(digest.get(), reinterpret_cast<unsigned char*>(made.data()), &num_bytes,
                                        signing_bytes(text), text.size()) == 1;
  KVFERRY_CHECK(is_made && num_bytes == made.size(), "OpenSSL failed to sign {} bytes with Ed25519", text.size());
  return made;
}

bool is_signed_by(const Bytes32& certificate, std::string_view text, std::string_view signature) {
  const OwnedOpenSsl<EVP_PKEY> key(
      ::EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, certificate.data(), certificate.size()));
  const OwnedOpenSsl<EVP_MD_CTX> digest(::EVP_MD_CTX_new());
  return key != nullptr && digest != nullptr && signature.size() == kEd25519Bytes &&
         ::EVP_DigestVerifyInit(digest.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         ::EVP_DigestVerify(digest.get(), signing_bytes(signature), signature.size(), signing_bytes(text),
                            text.size()) == 1;
}

}  // namespace kvferry::net
