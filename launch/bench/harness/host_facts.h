// What a reader of the figures wants to know of the machine.
#pragma once

#include <nlohmann/json.hpp>

namespace kvferry::bench {

/// {"version", "boot_id", "cores", "cpu", "kernel", "huge_pages", "date"}; what can't be read is empty.
nlohmann::json host_facts();

}  // namespace kvferry::bench
