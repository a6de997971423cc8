// Texts for errors of OpenSSL.
#pragma once

#include <string>
#include <string_view>

namespace kvferry::net {

/// Returns the first error that OpenSSL has recorded on this thread since ERR_clear_error(), because later ones mostly
/// say only which step failed for that reason. Returns `if_none` if it has recorded none.
std::string openssl_error(std::string_view if_none);

}  // namespace kvferry::net
