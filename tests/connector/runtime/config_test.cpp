#include "connector/runtime/config.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>

#include "connector/runtime/worker/pool_sizes.h"
#include "tests/settings_page.h"

namespace kvferry {
namespace {

using Env = std::map<std::string, std::string>;

Result<ConnectorConfig> load(const std::string& extra, const Env& env = {}) {
  return load_config(extra, [&](const char* name) {
    const auto found = env.find(name);
    return found == env.end() ? nullptr : found->second.c_str();
  });
}

std::string written(const std::string& text) {
  const std::string path = ::testing::TempDir() + "kvferry_config_test.yaml";
  std::ofstream(path) << text;
  return path;
}

TEST(Config, DefaultsHoldWhereNothingIsSet) {
  const auto config = load("{}");
  ASSERT_TRUE(config);
  EXPECT_EQ(config->controller, "tcp://127.0.0.1:14600");
  EXPECT_EQ(config->chunk_tokens, 256u);
  EXPECT_TRUE(config->save_decode_cache);
  EXPECT_TRUE(config->save_partial_chunks);
}

TEST(Config, ExtraConfigBeatsEnvironmentBeatsFile) {
  const std::string file = written("chunk_tokens: 32\nload_timeout_ms: 70\nnamespace: from-file\n");
  const auto config =
      load(R"({"chunk_tokens": 128})",
           {{"KVFERRY_CONFIG", file}, {"KVFERRY_CHUNK_TOKENS", "64"}, {"KVFERRY_LOAD_TIMEOUT_MS", "80"}});
  ASSERT_TRUE(config) << config.error().what;
  EXPECT_EQ(config->chunk_tokens, 128u);
  EXPECT_EQ(config->load_timeout_ms, 80);
  EXPECT_EQ(config->name_space, "from-file");
}

TEST(Config, BytesMayCarryAUnit) {
  EXPECT_EQ(load(R"({"pool_bytes": "512MiB"})")->pool_bytes, std::uint64_t{512} << 20);
  EXPECT_EQ(load(R"({"pool_bytes": 4096})")->pool_bytes, 4096u);
  EXPECT_EQ(load("{}")->gpu_pool_bytes, ConnectorConfig::kShareOfGpu);
  EXPECT_EQ(load(R"({"gpu_pool_bytes": "20GiB"})")->gpu_pool_bytes, std::uint64_t{20} << 30);
  EXPECT_EQ(load(R"({"gpu_pool_bytes": 0})")->gpu_pool_bytes, 0u);
  EXPECT_EQ(load("{}", {{"KVFERRY_POOL_BYTES", "2GiB"}})->pool_bytes, std::uint64_t{2} << 30);
}

TEST(Config, PoolsAreSharesOfTheMemoryByDefault) {
  EXPECT_EQ(load("{}")->pool_bytes, 0u);
  EXPECT_EQ(default_pool_bytes(kGiB), kGiB / 2);
  EXPECT_EQ(default_pool_bytes(8 * kGiB), kGiB);
  EXPECT_EQ(default_pool_bytes(64 * kGiB), 4 * kGiB);
  EXPECT_EQ(default_pool_bytes(2000 * kGiB), 16 * kGiB);
  EXPECT_EQ(default_gpu_pool_bytes(kGiB, kGiB), 0u);
  EXPECT_EQ(default_gpu_pool_bytes(15 * kGiB, 16 * kGiB), 7 * kGiB);
  EXPECT_EQ(default_gpu_pool_bytes(15 * kGiB, 4 * kGiB), 4 * kGiB);
}

TEST(Config, GivesTheTransportItsOptions) {
  const auto options =
      transport_options(*load(R"({"path": "tcp", "silence_ms": 7000, "advertise_host": "::1", "ports": "20000-20009",
                "encrypt_tcp": "always"})"));
  ASSERT_TRUE(options) << options.error().what;
  EXPECT_EQ(options->path, Path::kTcp);
  EXPECT_EQ(options->common.silence_ns, 7 * kSecond);
  EXPECT_EQ(options->tcp.listen_host, "::1");
  EXPECT_EQ(options->tcp.listen_ports.last, 20'009);
  EXPECT_EQ(options->tcp.encrypt, net::Encrypt::kAlways);
  EXPECT_FALSE(options->common.key);
  EXPECT_EQ(transport_options(*load("{}"))->common.silence_ns, 2 * kSecond);
  EXPECT_FALSE(transport_options(*load(R"({"cluster_key_file": "/nowhere/key"})")));
}

TEST(Config, NamesTheCardsToChooseFrom) {
  const auto chosen = [](const std::string& nics) {
    return transport_options(*load("{\"nics\": \"" + nics + "\"}"), "0000:1b:00.0")->ucx;
  };
  EXPECT_EQ(chosen("auto").gpu_bus_id, "0000:1b:00.0");
  EXPECT_TRUE(chosen("auto").nics.empty());
  EXPECT_EQ(chosen("all").gpu_bus_id, "");
  EXPECT_TRUE(chosen("all").nics.empty());
  EXPECT_EQ(chosen("mlx5_0,mlx5_3:1").nics, (std::vector<std::string>{"mlx5_0", "mlx5_3:1"}));
  EXPECT_EQ(chosen("mlx5_0").gpu_bus_id, "0000:1b:00.0");
}

TEST(Config, WhereAServerServesIsAUrl) {
  EXPECT_EQ(load("{}")->serves, "");
  EXPECT_EQ(load(R"({"serves": ""})")->serves, "");
  EXPECT_EQ(load(R"({"serves": "http://10.0.0.7:8100"})")->serves, "http://10.0.0.7:8100");
  EXPECT_EQ(load("{}", {{"KVFERRY_SERVES", "https://node-7/vllm"}})->serves, "https://node-7/vllm");
  EXPECT_NE(load(R"({"serves": "10.0.0.7:8100"})").error().what.find("allowed: http://HOST:PORT"), std::string::npos);
}

TEST(Config, AnUnknownKeyIsAnErrorThatNamesItAndTheAllowedOnes) {
  const auto config = load(R"({"chunk_token": 128})");
  ASSERT_FALSE(config);
  EXPECT_NE(config.error().what.find("unknown key 'chunk_token' (value 128)"), std::string::npos)
      << config.error().what;
  EXPECT_NE(config.error().what.find("chunk_tokens"), std::string::npos);
}

TEST(Config, AFormerNameOfAKeyIsAnAlias) {
  EXPECT_FALSE(load(R"({"save_unfull_chunk": false})")->save_partial_chunks);
  EXPECT_FALSE(load("{}", {{"KVFERRY_SAVE_UNFULL_CHUNK", "false"}})->save_partial_chunks);
  EXPECT_FALSE(load("{}", {{"KVFERRY_CONFIG", written("save_unfull_chunk: false\n")}})->save_partial_chunks);
  EXPECT_FALSE(load(R"({"save_unfull_chunk": true, "save_partial_chunks": false})")->save_partial_chunks)
      << "the present name wins";
  EXPECT_NE(load(R"({"save_unfull_chunk": 7})").error().what.find("save_unfull_chunk is '7'"), std::string::npos);
}

TEST(SettingsPage, HasTheSettingsOfTheConnector) {
  const std::string table = settings_markdown(connector_settings());
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 2 + std::ssize(connector_settings()));
  expect_on_settings_page("## The connector", table);
}

TEST(Config, EverySettingRefusesAListAndSaysWhatIsAllowed) {
  for (const Setting<ConnectorConfig>& setting : connector_settings()) {
    const auto config = load(fmt::format(R"({{"{}": [7]}})", setting.key));
    ASSERT_FALSE(config) << setting.key;
    EXPECT_EQ(config.error().code, ErrorCode::kInvalidArgument);
    const std::string sentence = fmt::format("{} is '[7]'", setting.key);
    EXPECT_NE(config.error().what.find(sentence), std::string::npos) << config.error().what;
    EXPECT_NE(config.error().what.find("allowed: " + setting.allowed), std::string::npos) << config.error().what;
  }
}

class BadValue : public ::testing::TestWithParam<const char*> {};
TEST_P(BadValue, IsAnErrorThatNamesKeyValueAndWhatIsAllowed) {
  const auto config = load(GetParam());
  ASSERT_FALSE(config) << GetParam();
  EXPECT_EQ(config.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(config.error().what.find("allowed: "), std::string::npos) << config.error().what;
}
INSTANTIATE_TEST_SUITE_P(
    All, BadValue,
    ::testing::Values(R"({"chunk_tokens": 0})", R"({"chunk_tokens": "many"})", R"({"chunk_tokens": 1.5})",
                      R"({"pool_bytes": "5 apples"})", R"({"pool_bytes": -1})", R"({"gpu_pool_bytes": "some"})",
                      R"({"lands_in_gpu": 7})", R"({"pool_bytes": "99999999999GiB"})",
                      R"({"save_decode_cache": "perhaps"})", R"({"path": "carrier pigeon"})",
                      R"({"controller": "localhost:14600"})", R"({"controller": "tcp://h:1,nonsense"})",
                      R"({"controller": "unix://relative"})", R"({"load_timeout_ms": 0})", R"({"config": 7})",
                      R"({"cluster_key_file": 7})", R"({"encrypt_tcp": "sometimes"})", R"({"serves": "tcp://h:1"})",
                      R"({"update_group": "a b"})", R"({"serves": "http://"})", R"({"serves": "http://a b"})",
                      R"({"serves": 8000})", R"({"silence_ms": 499})", R"({"silence_ms": 600001})", R"({"nics": ""})",
                      R"({"nics": "mlx5_0,,mlx5_1"})", R"({"nics": "mlx5_0,"})", R"({"ports": "9-8"})",
                      R"({"ports": "any"})"));

TEST(Config, ControllersAreWhatTheClientTakes) {
  for (const std::string controller : {"ipc:///run/kvferry", "unix:///run/kvferry.sock", "stream://[::1]:14601",
                                       "tcp://a:1,stream://b:2,unix:///run/c"}) {
    const auto config = load("{\"controller\": \"" + controller + "\"}");
    ASSERT_TRUE(config) << config.error().what;
    EXPECT_EQ(config->controller, controller);
  }
}

TEST(Config, AFileThatIsMissingOrNoMapIsNamed) {
  EXPECT_NE(load(R"({"config": "/nowhere/kvferry.yaml"})").error().what.find("/nowhere/kvferry.yaml"),
            std::string::npos);
  const auto list = load("{}", {{"KVFERRY_CONFIG", written("- a\n- b\n")}});
  ASSERT_FALSE(list);
  const auto unknown = load("{}", {{"KVFERRY_CONFIG", written("pool_byte: 7\n")}});
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().what.find("pool_byte"), std::string::npos);
}

}  // namespace
}  // namespace kvferry
