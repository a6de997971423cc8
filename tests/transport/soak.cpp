// transport_soak --backend NAME [--transfers N] [--seed S] [--without LIST]: see soak_run.h. Exits with status 1 if
// anything was wrong. The same seed gives the same transfers; only their overlap differs.
#include <cstdio>
#include <sstream>
#include <stdexcept>
#include <string_view>

#include "tests/transport/soak_run.h"

#ifndef __has_feature  // g++ has macros of its own for this
#define __has_feature(feature) 0
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) || \
    __has_feature(thread_sanitizer)
constexpr bool kHasSanitizer = true;
#else
constexpr bool kHasSanitizer = false;
#endif

namespace {

constexpr char kUsage[] =
    "usage: transport_soak --backend NAME [--transfers N] [--seed S] "
    "[--without feeds,checksums,grants,restarts,stops,disconnects,cancels]";

kvferry::soak::Options parse(int argc, char** argv) {
  kvferry::soak::Options options;
  options.has_sanitizer = kHasSanitizer;
  for (int at = 1; at < argc; at += 2) {
    const std::string_view name = argv[at];
    if (at + 1 == argc) throw std::invalid_argument("an option lacks its value");
    const std::string value = argv[at + 1];
    if (name == "--backend") {
      options.backend = value;
    } else if (name == "--transfers") {
      options.num_transfers = std::stoull(value);
    } else if (name == "--seed") {
      options.seed = std::stoull(value);
    } else if (name == "--without") {
      std::istringstream list(value);
      for (std::string what; std::getline(list, what, ',');) options.without.insert(what);
    } else {
      throw std::invalid_argument("unknown option");
    }
  }
  if (options.backend.empty() || options.num_transfers == 0) throw std::invalid_argument("no backend or no transfers");
  return options;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string_view(argv[1]) == "--help") {
    std::puts(kUsage);
    return 0;
  }
  try {
    return kvferry::soak::Soak(parse(argc, argv)).run() ? 0 : 1;
  } catch (const std::logic_error& error) {
    std::fprintf(stderr, "%s; %s\n", error.what(), kUsage);
    return 2;
  }
}
