// Tests the settings of `kvferry controller`. check_cli.py tests the binary.
#include "launch/cli/controller_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/settings_page.h"

namespace kvferry::cli {
namespace {

using ::testing::HasSubstr;

TEST(SettingsPage, HasTheSettingsOfTheController) {
  expect_on_settings_page("## `kvferry controller`", settings_markdown(controller_settings()));
}

TEST(ControllerSettings, AnEntryWithAnUnknownKeyOrABadValueIsNamed) {
  const auto what = [](SettingEntry entry) {
    return read_controller_settings({std::move(entry)}, std::nullopt).error().what;
  };
  EXPECT_THAT(what({"bnd", {"x"}, "--bnd"}), HasSubstr("--bnd: unknown key 'bnd' (value x); allowed: bind, "));
  EXPECT_THAT(what({"http", {"x"}, "--http"}),
              HasSubstr("setting http is 'x' (from --http); allowed: none, or HOST:PORT"));
}

}  // namespace
}  // namespace kvferry::cli
