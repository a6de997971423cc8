// The page of settings, launch/docs/configuration.md, for tests that compare it with the tables in the code.
#pragma once

#include <fstream>
#include <sstream>
#include <string>

namespace kvferry {

inline std::string settings_page() {
  std::ostringstream page;
  page << std::ifstream(KVFERRY_SETTINGS_PAGE).rdbuf();
  return page.str();
}

}  // namespace kvferry
