// Compares the page of settings, launch/docs/configuration.md, with the tables in the code. Used by tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

namespace kvferry {

/// Expects that `table` is the first table below `heading` on the page. If KVFERRY_WRITE_PAGE is in the environment,
/// writes the table to the page first.
inline void expect_on_settings_page(const std::string& heading, const std::string& table) {
  std::ostringstream read;
  read << std::ifstream(KVFERRY_SETTINGS_PAGE).rdbuf();
  std::string page = read.str();
  const std::size_t begin = page.find("\n| ", page.find("\n" + heading + "\n")) + 1;
  const std::size_t end = page.find("\n\n", begin) + 1;
  ASSERT_TRUE(begin > 0 && end > begin) << "the page has no table below '" << heading << "'";
  if (std::getenv("KVFERRY_WRITE_PAGE") != nullptr) {
    page.replace(begin, end - begin, table);
    std::ofstream(KVFERRY_SETTINGS_PAGE) << page;
  }
  EXPECT_EQ(page.substr(begin, table.size()), table)
      << "to write the page: KVFERRY_WRITE_PAGE=1 ctest --preset release -R SettingsPage";
}

}  // namespace kvferry
