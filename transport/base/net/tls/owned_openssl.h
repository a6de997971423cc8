// Owners of OpenSSL's objects.
#pragma once

#include <memory>

struct evp_md_ctx_st;
struct evp_pkey_st;
struct ssl_ctx_st;
struct ssl_st;
struct x509_st;

namespace kvferry::net {

struct FreeOpenSsl {
  void operator()(ssl_ctx_st* context) const;
  void operator()(ssl_st* session) const;
  void operator()(evp_pkey_st* key) const;
  void operator()(evp_md_ctx_st* digest) const;
  void operator()(x509_st* certificate) const;
};

template <typename T>
using OwnedOpenSsl = std::unique_ptr<T, FreeOpenSsl>;

}  // namespace kvferry::net
