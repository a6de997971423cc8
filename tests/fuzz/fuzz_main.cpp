// The entry points that libFuzzer calls. `--target=NAME` chooses the target; `--seeds=FOLDER` writes the target's seeds
// to a folder and ends; `--list` prints the names of all targets.
#include <spdlog/spdlog.h>

#include <cstdio>
#include <filesystem>
#include <fstream>

#include "tests/fuzz/target.h"

namespace {

const kvferry::fuzz::Target* target = nullptr;

const kvferry::fuzz::Target* find(std::string_view name) {
  for (const kvferry::fuzz::Target& one : kvferry::fuzz::targets())
    if (one.name == name) return &one;
  return nullptr;
}

void write_seeds(const std::filesystem::path& folder) {
  std::filesystem::create_directories(folder);
  std::size_t number = 0;
  for (const std::string& seed : target->seeds())
    std::ofstream(folder / fmt::format("seed-{}", number++), std::ios::binary) << seed;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  spdlog::set_level(spdlog::level::off);
  for (int i = 1; i < *argc; ++i) {
    const std::string_view argument = (*argv)[i];
    if (argument == "--list") {
      for (const kvferry::fuzz::Target& one : kvferry::fuzz::targets()) std::puts(std::string(one.name).c_str());
      std::exit(0);
    }
    if (argument.starts_with("--target=")) target = find(argument.substr(9));
    if (argument.starts_with("--seeds=") && target != nullptr) {
      write_seeds(argument.substr(8));
      std::exit(0);
    }
  }
  if (target != nullptr) return 0;
  std::fputs("kvferry_fuzz: --target=NAME is missing or unknown; --list prints the names\n", stderr);
  std::exit(2);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  target->run({reinterpret_cast<const char*>(data), size});
  return 0;
}
