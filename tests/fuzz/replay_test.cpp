// The short form of tests/fuzz/run: gives every target its seeds, mutations of the seeds, and the corpus.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>

#include "tests/fuzz/lies.h"
#include "tests/fuzz/target.h"
#include "transport/base/log.h"

namespace kvferry::fuzz {
namespace {

constexpr int kMutationsPerSeed = 100;

class FuzzTargets : public ::testing::TestWithParam<Target> {
 protected:
  FuzzTargets() { log().set_level(spdlog::level::off); }
};

/// Changes some bytes at random; removes or repeats some.
std::string mutate(std::string bytes, std::mt19937& random) {
  for (std::size_t count = 1 + random() % 4; count > 0 && !bytes.empty(); --count) {
    const std::size_t at = random() % bytes.size();
    const std::size_t length = 1 + random() % 8;
    switch (random() % 4) {
      case 0:
        bytes[at] = static_cast<char>(random());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] + (random() % 2 == 0 ? 1 : -1));
        break;
      case 2:
        bytes.erase(at, length);
        break;
      default:
        bytes.insert(at, bytes.substr(random() % bytes.size(), length));
    }
  }
  return bytes;
}

/// Returns the inputs of the corpus. Each of them once caused a failure.
std::vector<std::string> corpus_of(std::string_view target) {
  std::vector<std::string> inputs;
  std::error_code no_folder;
  for (const auto& entry :
       std::filesystem::directory_iterator(std::filesystem::path(KVFERRY_CORPUS) / target, no_folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  return inputs;
}

TEST_P(FuzzTargets, SurviveTheirSeedsTheCorpusAndWhatResemblesThem) {
  std::mt19937 random(20);
  std::vector<std::string> inputs = GetParam().seeds();
  ASSERT_FALSE(inputs.empty());
  for (std::string& input : corpus_of(GetParam().name)) inputs.push_back(std::move(input));
  GetParam().run("");
  for (const std::string& input : inputs) {
    GetParam().run(input);
    for (int i = 0; i < kMutationsPerSeed; ++i) GetParam().run(mutate(input, random));
  }
}

INSTANTIATE_TEST_SUITE_P(All, FuzzTargets, ::testing::ValuesIn(targets().begin(), targets().end()),
                         [](const auto& made) { return std::string(made.param.name); });

}  // namespace
}  // namespace kvferry::fuzz
