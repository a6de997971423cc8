// The command `kvferry token`.
#include <memory>

#include "controller/http/http_access.h"
#include "launch/cli/commands.h"

namespace kvferry::cli {

Run add_token_command(CLI::App& app) {
  CLI::App* const command = app.add_subcommand(
      "token",
      "Print the token that clients of the HTTP API (--http) of a controller with a cluster key send as "
      "'Authorization: Bearer TOKEN'.");
  const auto key_file = std::make_shared<std::string>();
  const auto role = std::make_shared<std::string>("reader");
  command
      ->add_option(
          "--cluster-key-file", *key_file,
          "File with the key of the deployment, or with a member's own key, whose role then counts instead of --role")
      ->envname("KVFERRY_CLUSTER_KEY_FILE")
      ->required();
  command
      ->add_option("--role", *role,
                   "reader: may query nodes, status, metrics and which engines hold a prompt; admin: may also register "
                   "engines that the controller follows")
      ->check(CLI::IsMember({"reader", "admin"}))
      ->capture_default_str();
  return [key_file, role]() -> Result<void> {
    const auto key = KVFERRY_TRY(net::read_cluster_key(*key_file));
    if (!key)
      return Error{ErrorCode::kInvalidArgument,
                   "the value of --cluster-key-file is empty; allowed: the path of a key file"};
    if (const auto content = key->content(); content->own) {
      fmt::print("{}\n", content->own->http_token());
      return {};
    }
    const auto wanted = *role == "admin" ? controller::HttpRole::kAdmin : controller::HttpRole::kReader;
    fmt::print("{}\n", controller::http_token(*key, wanted));
    return {};
  };
}

}  // namespace kvferry::cli
