// Check of the key file that this host's nodes read.
#pragma once

#include <string>
#include <vector>

#include "launch/cli/doctor/finding.h"

namespace kvferry::cli {

/// Checks that the file has a valid key, and a member's key that is in the list of members. Returns no findings if
/// `file` is empty. The caller sets Finding::check.
std::vector<Finding> check_key(const std::string& file);

}  // namespace kvferry::cli
