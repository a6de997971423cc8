// Tenants share a node but not each other's KV. They are told apart by the cache_salt of their requests.
#pragma once

#include <cstdint>
#include <string_view>

namespace kvferry {

/// A tenant's number, which is the same on all nodes. 0: requests without a cache_salt.
using TenantId = std::uint64_t;

/// Returns the tenant whose requests have this cache_salt. A salt "kvferry.TENANT.SALT", as launch/proxy makes it, is
/// one of many of the tenant TENANT; any other salt is a tenant by itself.
TenantId tenant_of(std::string_view cache_salt);

}  // namespace kvferry
