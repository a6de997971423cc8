// The facts about a machine that readers of its figures need.
#pragma once

#include <nlohmann/json.hpp>

namespace kvferry::bench {

/// {"version", "boot_id", "cores", "cpu", "kernel", "huge_pages", "date"}; a fact that can't be read is empty.
nlohmann::json host_facts();

}  // namespace kvferry::bench
