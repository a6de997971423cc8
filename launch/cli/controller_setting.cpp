#include "launch/cli/controller_setting.h"

#include "controller/api/endpoint.h"

namespace kvferry::cli {
namespace {

const Setting kSettings[] = {
    {"controller", "tcp://127.0.0.1:14600", controller::allowed_endpoints(controller::EndpointUse::kConnect),
     [](std::string_view value) {
       return static_cast<bool>(controller::check_endpoint(value, controller::EndpointUse::kConnect));
     }},
};

}  // namespace

void add_controller_option(CLI::App& command, Values& flags) {
  command.add_option_function<std::string>(
      "--controller", [&flags](const std::string& value) { flags["controller"] = value; },
      fmt::format("Which one: {}; also KVFERRY_CONTROLLER [{}]", kSettings[0].allowed, kSettings[0].fallback));
}

Result<std::string> controller_of(const Values& flags) {
  const Result<Values> values = resolve(kSettings, flags, std::nullopt);
  if (!values) return values.error();
  return values->at("controller");
}

}  // namespace kvferry::cli
