// Tenants share a node but not each other's KV. They are told apart by the cache_salt of their requests.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvferry {

/// A tenant's number, which is the same on all nodes. 0: requests without a cache_salt.
using TenantId = std::uint64_t;

/// Returns the tenant whose requests have this cache_salt. The salt "kvferry.TENANT" and all salts of the form
/// "kvferry.TENANT.SALT", which launch/proxy makes, belong to the tenant TENANT. Any other salt has a tenant of its
/// own.
TenantId tenant_of(std::string_view cache_salt);

}  // namespace kvferry
