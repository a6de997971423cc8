#include "connector/core/tenant_id.h"

#include <algorithm>
#include <cstring>

#include "transport/base/chunk_key.h"

namespace kvferry {

TenantId tenant_of(std::string_view cache_salt) {
  if (cache_salt.empty()) return 0;
  constexpr std::string_view kPrefix = "kvferry.";
  if (cache_salt.starts_with(kPrefix)) cache_salt = cache_salt.substr(0, cache_salt.find('.', kPrefix.size()));
  const ChunkKey digest = root_key("tenant", cache_salt);
  TenantId id = 0;
  std::memcpy(&id, digest.bytes.data(), sizeof id);
  return std::max<TenantId>(id, 1);
}

}  // namespace kvferry
