#include "transport/base/net/tls/certificate.h"

#include <openssl/ssl.h>
#include <openssl/x509.h>

#include "transport/base/check.h"
#include "transport/base/net/tls/owned_openssl.h"

namespace kvferry::net {
namespace {

constexpr long kVersion3 = 2, kValidForSeconds = 60L * 60 * 24 * 365;

}  // namespace

void use_certificate(ssl_st* ssl, const Bytes32& secret) {
  const OwnedOpenSsl<EVP_PKEY> key(
      ::EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, secret.data(), secret.size()));
  const OwnedOpenSsl<X509> made(::X509_new());
  // The certificate has times because the format requires them; peers ignore the times.
  const bool is_used = key != nullptr && made != nullptr && ::X509_set_version(made.get(), kVersion3) == 1 &&
                       ::ASN1_INTEGER_set(::X509_get_serialNumber(made.get()), 1) == 1 &&
                       ::X509_gmtime_adj(X509_getm_notBefore(made.get()), 0) != nullptr &&
                       ::X509_gmtime_adj(X509_getm_notAfter(made.get()), kValidForSeconds) != nullptr &&
                       ::X509_set_pubkey(made.get(), key.get()) == 1 &&
                       ::X509_sign(made.get(), key.get(), nullptr) > 0 && ::SSL_use_certificate(ssl, made.get()) == 1 &&
                       ::SSL_use_PrivateKey(ssl, key.get()) == 1;
  KVFERRY_CHECK(is_used, "OpenSSL failed to make or use the Ed25519 certificate of this node");
}

std::string key_in_certificate(x509_store_ctx_st* verified) {
  X509* const certificate = ::X509_STORE_CTX_get0_cert(verified);
  const EVP_PKEY* const key = certificate == nullptr ? nullptr : ::X509_get0_pubkey(certificate);
  if (key == nullptr || ::EVP_PKEY_get_base_id(key) != EVP_PKEY_ED25519) return {};
  Bytes32 bytes{};
  std::size_t num_bytes = bytes.size();
  if (::EVP_PKEY_get_raw_public_key(key, bytes.data(), &num_bytes) != 1 || num_bytes != bytes.size()) return {};
  return std::string(text_of(bytes));
}

}  // namespace kvferry::net
