// The command `kvferry keygen`.
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "launch/cli/commands.h"
#include "transport/base/net/cluster_key.h"
#include "transport/base/owned_fd.h"

namespace kvferry::cli {
namespace {

Error failed(const std::string& what, int error_number) {
  return Error{ErrorCode::kUnavailable, fmt::format("{}: {}", what, std::generic_category().message(error_number))};
}

Result<net::Bytes32> random_bytes() {
  net::Bytes32 bytes{};
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    return failed("the operating system gives no random bytes for a key", errno);
  return bytes;
}

Result<std::string> new_key() {
  const net::Bytes32 key = KVFERRY_TRY(random_bytes());
  return hex_of(net::text_of(key)) + "\n";
}

constexpr mode_t kKeyMode = 0600, kListMode = 0644;  // every user may read the list of members: its keys are public

/// Creates a file with the mode `mode` or, if `like` is not null, with the owner, group and mode in `*like`.
Result<void> create(const std::string& path, const std::string& text, const struct stat* like, mode_t mode = kKeyMode) {
  const OwnedFd file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode));
  if (!file && errno == EEXIST)
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("{} exists; a key is never overwritten, so choose another name or move the file away", path)};
  if (!file) return failed(fmt::format("can't create {}", path), errno);
  errno = ENOSPC;  // the reason to report if write() writes less without setting errno
  const ssize_t written = ::write(file.get(), text.data(), text.size());
  const bool is_owned = like == nullptr || (::fchown(file.get(), like->st_uid, like->st_gid) == 0 &&
                                            ::fchmod(file.get(), like->st_mode & 07777U) == 0);
  if (written == static_cast<ssize_t>(text.size()) && is_owned && ::fsync(file.get()) == 0) return {};
  const int error_number = errno;
  ::unlink(path.c_str());
  return failed(fmt::format("can't write {}", path), error_number);
}

enum class Step { kAdd, kSwitch, kRetire };

Result<std::vector<std::string>> keys_after(Step step, std::vector<std::string> keys, const std::string& path) {
  const bool is_rotating = keys.size() > 1;
  if (step == Step::kAdd && is_rotating)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{} has two keys, because a rotation is in progress; end it with --retire before you add "
                             "another key",
                             path)};
  if (step != Step::kAdd && !is_rotating)
    return Error{ErrorCode::kInvalidArgument,
                 fmt::format("{} has only one key; add the next one with --add first", path)};
  if (step == Step::kAdd) keys.push_back(KVFERRY_TRY(new_key()));
  if (step == Step::kSwitch) std::swap(keys[0], keys[1]);
  if (step == Step::kRetire) keys.pop_back();
  return keys;
}

/// Replaces the file by a rename, so that each reader sees either the whole former content or the whole new content.
Result<void> replace_file(const std::string& name, const std::string& content) {
  std::error_code error;
  // With this path, rename() replaces the target of a symbolic link and not the link itself.
  const std::string path = std::filesystem::canonical(name, error).string();
  struct stat like {};
  if (error || ::stat(path.c_str(), &like) != 0)
    return failed(fmt::format("can't read {}", name), error ? error.value() : errno);
  const std::string written = fmt::format("{}.{}", path, ::getpid());
  KVFERRY_TRY(create(written, content, &like));
  if (::rename(written.c_str(), path.c_str()) == 0) return {};
  const int error_number = errno;
  ::unlink(written.c_str());
  return failed(fmt::format("can't replace {}", path), error_number);
}

Result<std::vector<std::string>> read_keys(const std::string& name) {
  const std::string content = KVFERRY_TRY(net::read_key_file(name));
  if (net::is_member_key(content))
    return Error{
        ErrorCode::kInvalidArgument,
        fmt::format("{} is the key of a member; this command needs the cluster key, from which it was made", name)};
  Result<std::vector<std::string>> keys = net::parse_cluster_keys(content);
  if (!keys) return std::move(keys).error().with(name);
  return keys;
}

/// Returns the members in the list beside the cluster key; an empty vector if there is no list yet.
Result<std::vector<net::Member>> members_beside(const std::string& key_file) {
  std::optional<std::vector<net::Member>> members = KVFERRY_TRY(net::read_members(key_file));
  return std::move(members).value_or(std::vector<net::Member>{});
}

/// Returns the path of a member's key file, which is in the folder of the cluster key.
std::string key_of_member(const std::string& key_file, const std::string& name) {
  return key_file.substr(0, key_file.rfind('/') + 1) + name + ".key";
}

/// Executes a step of a key rotation: changes the file of the cluster key, and in the key files of the members, which
/// are in the same folder, the part that derives from the cluster keys.
Result<void> rotate(Step step, const std::string& name) {
  std::vector<std::string> before = KVFERRY_TRY(read_keys(name));
  const std::vector<std::string> keys = KVFERRY_TRY(keys_after(step, std::move(before), name));
  const std::vector<net::Member> members = KVFERRY_TRY(members_beside(name));
  std::vector<std::pair<std::string, std::string>> files = {{name, net::format_cluster_keys(keys)}};
  for (const net::Member& member : members) {
    const std::string file = key_of_member(name, member.identity.name);
    const std::string content = KVFERRY_TRY(net::read_key_file(file));
    Result<net::MemberKey> key = net::parse_member_key(content);
    if (!key) return std::move(key).error().with(file);
    key->shared = net::shared_with(member.identity.role, keys);
    files.emplace_back(file, net::format_member_key(*key));
  }
  for (const auto& [file, content] : files) KVFERRY_TRY(replace_file(file, content));
  return {};
}

Result<void> replace_members(const std::string& key_file, const std::vector<net::Member>& members) {
  const std::string file = net::members_file_of(key_file);
  std::error_code error;
  const std::string content = net::format_members(members);
  return std::filesystem::exists(file, error) ? replace_file(file, content) : create(file, content, nullptr, kListMode);
}

/// Makes a key file for each new member and adds the members to the list. Returns the paths of the key files.
Result<std::vector<std::string>> add_members(const std::string& key_file, const std::vector<std::string>& names,
                                             net::Role role) {
  const std::vector<std::string> keys = KVFERRY_TRY(read_keys(key_file));
  std::vector<net::Member> members = KVFERRY_TRY(members_beside(key_file));
  const std::vector<net::MemberKey::Shared> shared = net::shared_with(role, keys);
  std::vector<net::MemberKey> added;
  for (const std::string& name : names) {
    if (!net::is_member_name(name))
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("'{}' can't be a member's name; allowed: 1 to 63 letters, digits and '-'", name)};
    if (std::ranges::any_of(members, [&](const net::Member& member) { return member.identity.name == name; }))
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("'{}' is a member already; --revoke removes it, so that it can be added anew", name)};
    added.push_back({{name, role}, KVFERRY_TRY(random_bytes()), shared});
    members.push_back(net::public_of(added.back()));
  }
  std::vector<std::string> files;
  for (const net::MemberKey& key : added) {
    std::string file = key_of_member(key_file, key.identity.name);
    if (Result<void> made = create(file, net::format_member_key(key), nullptr); !made) {
      for (const std::string& useless : files) ::unlink(useless.c_str());
      return std::move(made).error();
    }
    files.push_back(std::move(file));
  }
  KVFERRY_TRY(replace_members(key_file, members));
  return files;
}

/// Removes members from the list, and deletes those of their key files that are in the folder of the cluster key.
/// Returns the path of the list.
Result<std::vector<std::string>> revoke_members(const std::string& key_file, const std::vector<std::string>& names) {
  KVFERRY_TRY(read_keys(key_file));
  std::vector<net::Member> members = KVFERRY_TRY(members_beside(key_file));
  for (const std::string& name : names)
    if (std::erase_if(members, [&](const net::Member& member) { return member.identity.name == name; }) == 0)
      return Error{ErrorCode::kInvalidArgument,
                   fmt::format("there is no member '{}' in {}", name, net::members_file_of(key_file))};
  KVFERRY_TRY(replace_members(key_file, members));
  for (const std::string& name : names) ::unlink(key_of_member(key_file, name).c_str());
  return std::vector<std::string>{net::members_file_of(key_file)};
}

struct KeygenFlags {
  std::string path, role = "worker";
  std::vector<std::string> added, revoked;
  std::optional<Step> step;
};

/// Locks the folder of `key_file` until the result is destroyed, so that no other keygen command changes keys in it at
/// the same time. Has no effect if the folder can't be opened or the file system has no locks.
OwnedFd locked(const std::string& key_file) {
  const std::string folder = key_file.substr(0, key_file.rfind('/') + 1);
  OwnedFd opened(::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (opened) ::flock(opened.get(), LOCK_EX);
  return opened;
}

/// Executes the command. Returns the paths that the caller prints: those of new members' key files, the path of the
/// list after --revoke, otherwise that of the cluster key.
Result<std::vector<std::string>> run_keygen(const KeygenFlags& flags) {
  const OwnedFd lock = locked(flags.path);
  if (!flags.added.empty()) {
    const auto role = std::find(net::kRoleNames.begin(), net::kRoleNames.end(), flags.role);
    return add_members(flags.path, flags.added, static_cast<net::Role>(role - net::kRoleNames.begin()));
  }
  if (!flags.revoked.empty()) return revoke_members(flags.path, flags.revoked);
  if (flags.step) {
    KVFERRY_TRY(rotate(*flags.step, flags.path));
  } else {
    const std::string key = KVFERRY_TRY(new_key());
    KVFERRY_TRY(create(flags.path, key, nullptr));
  }
  return std::vector<std::string>{flags.path};
}

}  // namespace

Run add_keygen_command(CLI::App& app) {
  CLI::App* const command = app.add_subcommand(
      "keygen",
      "Write a new cluster key, for the setting cluster_key_file, to a file that only its owner can read; or take one "
      "of the three steps that replace the key of a running deployment; or give a member a key of its own, or revoke "
      "it. Afterwards copy the changed files to the hosts that use them; running processes read them again.");
  const auto flags = std::make_shared<KeygenFlags>();
  command
      ->add_option("FILE", flags->path,
                   "Path of the cluster key: a file that does not exist yet; with one of the options below, the "
                   "existing file")
      ->required();
  CLI::Option_group* const steps = command->add_option_group("Steps");
  const auto add_step = [&](const char* name, Step value, const char* help) {
    steps->add_flag_callback(
        name, [flags, value] { flags->step = value; }, help);
  };
  add_step("--add", Step::kAdd, "Step 1: add a new key, which members accept but do not use yet");
  add_step("--switch", Step::kSwitch,
           "Step 2: let members use the other key in the file; they still accept the one used before");
  add_step("--retire", Step::kRetire, "Step 3: remove the key that is not in use; connections made with it end");
  CLI::Option* const adds = steps->add_option("--add-node", flags->added,
                                              "Write NAME.key, the key of this one member, and add it to "
                                              "kvferry.members; both are beside FILE; may be repeated");
  adds->type_name("NAME")->allow_extra_args(false);
  steps
      ->add_option("--revoke", flags->revoked,
                   "Remove this member from kvferry.members; its connections end; may be repeated")
      ->type_name("NAME")
      ->allow_extra_args(false);
  steps->require_option(0, 1);
  command
      ->add_option(
          "--role", flags->role,
          "With --add-node, what the member may do. reader: query the controller (routers, dashboards); worker: also "
          "register nodes and drain those; admin: also drain others, clear, purge and set quotas")
      ->check(CLI::IsMember({"reader", "worker", "admin"}))
      ->needs(adds)
      ->capture_default_str();
  return [flags]() -> Result<void> {
    const std::vector<std::string> paths = KVFERRY_TRY(run_keygen(*flags));
    for (const std::string& path : paths) fmt::print("{}\n", path);
    return {};
  };
}

}  // namespace kvferry::cli
