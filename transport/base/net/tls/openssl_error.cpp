#include "transport/base/net/tls/openssl_error.h"

#include <openssl/err.h>

#include <system_error>

namespace kvferry::net {

std::string openssl_error(std::string_view if_none) {
  const unsigned long code = ::ERR_peek_error();
  if (ERR_SYSTEM_ERROR(code)) return std::generic_category().message(ERR_GET_REASON(code));
  const char* const text = code == 0 ? nullptr : ::ERR_reason_error_string(code);
  if (text != nullptr) return text;
  return code == 0 ? std::string(if_none) : "error " + std::to_string(code) + " of OpenSSL, which has no text";
}

}  // namespace kvferry::net
