#include "transport/ucx/ucx_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <vector>

namespace kvferry::ucx {

namespace internal {
Api api;
}

namespace {

namespace fs = std::filesystem;

constexpr const char* kLibrary = "libucp.so.0";

/// Returns the file that contains this code: the program or a shared library.
fs::path own_file() {
  Dl_info info{};
  link_map* map = nullptr;
  const void* const inside = reinterpret_cast<const void*>(&load_ucx);
  if (::dladdr1(inside, &info, reinterpret_cast<void**>(&map), RTLD_DL_LINKMAP) == 0 || map == nullptr) return {};
  // The program itself has no name in the loader's list, so /proc/self/exe stands for it.
  std::error_code failure;
  return fs::canonical(*map->l_name != '\0' ? map->l_name : "/proc/self/exe", failure);
}

/// Returns paths of libucp.so.0 in the order in which they are tried.
std::vector<fs::path> places() {
  if (const char* const named = std::getenv("KVFERRY_UCX_LIBRARY"); named != nullptr && *named != '\0') return {named};
  std::vector<fs::path> found;
#ifdef KVFERRY_UCX_ROOT
  found.push_back(fs::path(KVFERRY_UCX_ROOT) / "lib" / kLibrary);
#endif
  // Packages of Python are beside each other: kvferry/_core.so, kvferry/bin/kvferry, libucx/lib/libucp.so.0.
  const fs::path package = own_file().parent_path();
  for (const fs::path& beside : {package.parent_path(), package.parent_path().parent_path()})
    found.push_back(beside / "libucx" / "lib" / kLibrary);
  std::error_code failure;
  std::erase_if(found, [&](const fs::path& path) { return !fs::exists(path, failure); });
  found.emplace_back(kLibrary);  // the library that the loader finds by its name
  return found;
}

void* open_library(const fs::path& path) {
  // The libraries that libucp needs must come from its own folder, where the loader might not look.
  if (path.has_parent_path()) {
    for (const char* const needed : {"libucm.so.0", "libucs.so.0", "libuct.so.0"})
      static_cast<void>(::dlopen((path.parent_path() / needed).c_str(), RTLD_NOW | RTLD_LOCAL));
  }
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

Result<void> load() {
  const auto unavailable = [](std::string_view what) {
    return Error{ErrorCode::kUnavailable,
                 fmt::format("UCX can't be used: {}; install it with `pip install libucx-cu13` (Debian: libucx0), or "
                             "name its {} in KVFERRY_UCX_LIBRARY",
                             what, kLibrary)};
  };
  // A process must not have two copies of UCX. UCX stays loaded, because it has hooks in the C library.
  void* library = ::dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  std::string why;
  for (const fs::path& path : places()) {
    if (library != nullptr) break;
    library = open_library(path);
    if (library == nullptr) why = ::dlerror();
  }
  if (library == nullptr) return unavailable(why);
  const char* missing = nullptr;
#define KVFERRY_UCX_FIND(name)                                                       \
  internal::api.name = reinterpret_cast<decltype(&::name)>(::dlsym(library, #name)); \
  if (missing == nullptr && internal::api.name == nullptr) missing = #name;
  KVFERRY_UCX_FUNCTIONS(KVFERRY_UCX_FIND)
#undef KVFERRY_UCX_FIND
  if (missing != nullptr)
    return unavailable(fmt::format("the UCX library has no function {} (it may be too old)", missing));
  return {};
}

}  // namespace

Result<void> load_ucx() {
  static const Result<void> loaded = load();
  return loaded;
}

}  // namespace kvferry::ucx
