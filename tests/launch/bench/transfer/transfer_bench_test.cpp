// Tests the arithmetic of `kvferry bench transfer`: sizes, shapes of models, flags, the pattern and the table; and the
// links and files of all benchmarks.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <set>
#include <sstream>

#include "launch/bench/harness/failure.h"
#include "launch/bench/harness/figures_file.h"
#include "launch/bench/harness/flags.h"
#include "launch/bench/harness/line_link.h"
#include "launch/bench/harness/programs.h"
#include "launch/bench/transfer/model_shape.h"
#include "launch/bench/transfer/options.h"
#include "launch/bench/transfer/pattern.h"
#include "launch/bench/transfer/rows.h"

namespace kvferry::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(ByteSize, ReadsWhatPeopleWrite) {
  EXPECT_EQ(parse_byte_size("4096").value(), 4096U);
  EXPECT_EQ(parse_byte_size("4KiB").value(), 4096U);
  EXPECT_EQ(parse_byte_size("64B").value(), 64U);
  EXPECT_EQ(parse_byte_size("1.5MiB").value(), 1572864U);
  EXPECT_EQ(parse_byte_size("2GiB").value(), 2ULL << 30);
}

TEST(ByteSize, RefusesTheRestAndSaysWhatIsAllowed) {
  for (const char* text :
       {"", "KiB", "-4", "4kb", "4 KiB", "0", "0.5", "1.2.3", "0x10", ".", "1e3", "9999999GiB", "inf"}) {
    const Result<std::uint64_t> size = parse_byte_size(text);
    ASSERT_FALSE(size) << text;
    EXPECT_EQ(size.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(size.error().what, HasSubstr("4KiB"));
  }
}

TEST(ByteSize, PicksTheLargestUnitThatDivides) {
  EXPECT_EQ(byte_size_text(4096), "4KiB");
  EXPECT_EQ(byte_size_text(1 << 20), "1MiB");
  EXPECT_EQ(byte_size_text(4097), "4097");
  EXPECT_EQ(byte_size_text(1536), "1536");
}

struct Expected {
  const char* model;
  const char* dtype;
  std::uint64_t tp;
  std::uint64_t block_bytes;
  std::uint64_t num_blocks;
};

TEST(ModelShape, FollowsFromThePublishedConfigurations) {
  const Expected cases[] = {
      {"llama-3.1-8b", "bf16", 1, 32768, 4096},    // block bytes: 16 x 8 x 128 x 2; blocks: 64 x 32 x 2
      {"llama-3.1-8b", "fp8", 1, 16384, 4096},     //
      {"llama-3.1-70b", "bf16", 1, 32768, 10240},  // blocks: 64 x 80 x 2
      {"llama-3.1-70b", "bf16", 8, 4096, 10240},   // each rank has one head
      {"qwen3-32b", "bf16", 1, 32768, 8192},       // blocks: 64 x 64 x 2
      {"deepseek-v3", "bf16", 1, 18432, 3904},     // block bytes: 16 x 576 x 2; blocks: 64 x 61
      {"deepseek-v3", "fp8", 8, 9216, 3904},       // every rank has the whole latent vector
  };
  for (const Expected& expected : cases) {
    const ModelBlocks blocks = blocks_of(find_model(expected.model).value(), expected.dtype, 1024, expected.tp).value();
    EXPECT_EQ(blocks.block_bytes, expected.block_bytes) << blocks.derivation;
    EXPECT_EQ(blocks.num_blocks, expected.num_blocks) << blocks.derivation;
  }
}

TEST(ModelShape, CountsAPartOfABlockAsOne) {
  EXPECT_EQ(blocks_of(find_model("llama-3.1-8b").value(), "bf16", 17, 1).value().num_blocks, 2U * 32 * 2);
}

TEST(ModelShape, RefusesWhatDoesNotExist) {
  EXPECT_THAT(find_model("llama-9").error().what, HasSubstr("llama-3.1-8b, llama-3.1-70b, qwen3-32b, deepseek-v3"));
  const ModelShape model = find_model("llama-3.1-8b").value();
  EXPECT_THAT(blocks_of(model, "int3", 16, 1).error().what, HasSubstr("bf16, fp8"));
  EXPECT_THAT(blocks_of(model, "bf16", 0, 1).error().what, HasSubstr("--tokens"));
  EXPECT_THAT(blocks_of(model, "bf16", 16, 3).error().what, HasSubstr("--tp"));
}

TEST(Pattern, OrdersAreDifferentPermutationsOfAllBlocks) {
  const Job job{true, 64, 500, 7};
  const std::vector<std::uint64_t> own = block_offsets(job, Side::kInitiator);
  const std::vector<std::uint64_t> others = block_offsets(job, Side::kTarget);
  EXPECT_NE(own, others);
  for (const auto& order : {own, others}) {
    EXPECT_EQ(std::set(order.begin(), order.end()).size(), job.num_blocks);
    EXPECT_EQ(*std::max_element(order.begin(), order.end()), (job.num_blocks - 1) * job.block_bytes);
  }
}

TEST(Pattern, FindsOneWrongBitAnEarlierSeedAndNoTransfer) {
  for (const bool is_push : {true, false}) {
    const Job job{is_push, 64, 50, 3};
    std::vector<std::byte> own(job.bytes());
    std::vector<std::byte> others(job.bytes());
    fill_pattern(own, 5, Side::kInitiator);
    fill_pattern(others, 5, Side::kTarget);
    const std::vector<std::byte>& from = is_push ? own : others;
    std::vector<std::byte>& to = is_push ? others : own;
    EXPECT_FALSE(holds_pattern(to, job, 5));
    const auto from_offsets = block_offsets(job, job.source());
    const auto to_offsets = block_offsets(job, is_push ? Side::kTarget : Side::kInitiator);
    for (std::size_t i = 0; i < job.num_blocks; ++i)
      std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(from_offsets[i]), job.block_bytes,
                  to.begin() + static_cast<std::ptrdiff_t>(to_offsets[i]));
    EXPECT_TRUE(holds_pattern(to, job, 5));
    EXPECT_FALSE(holds_pattern(to, job, 6));
    to[job.bytes() - 1] ^= std::byte{128};
    EXPECT_FALSE(holds_pattern(to, job, 5));
  }
}

TEST(Pattern, IsTheSameAsThePythonPeers) {
  // These are the values of pattern(7, 1, ...)[3] and Job(True, 64, 8, 9).blocks(0) in bench_worker.py. The test fails
  // if the Python and the C++ differ.
  EXPECT_EQ(pattern_word(7, Side::kTarget, 24), 0x99b7e4315f063a83ULL);
  std::vector<std::uint64_t> blocks = block_offsets({true, 64, 8, 9}, Side::kInitiator);
  for (std::uint64_t& block : blocks) block /= 64;
  EXPECT_THAT(blocks, ElementsAre(1, 7, 3, 2, 5, 4, 6, 0));
}

TEST(Options, DefaultsMakeRequestsOf64MiB) {
  const TransferOptions options = parse_options({}).value();
  ASSERT_EQ(options.shapes.size(), 6U);
  for (const Shape& shape : options.shapes) EXPECT_EQ(shape.block_bytes * shape.num_blocks, 64U << 20);
  EXPECT_EQ(options.shapes.front().num_blocks, 16384U);
  EXPECT_THAT(options.pushes, ElementsAre(true, false));
  EXPECT_THAT(options.memories, ElementsAre(MemoryKind::kKvferry, MemoryKind::kForeign));
}

TEST(Options, EveryBadValueIsNamedWithWhatIsAllowed) {
  const auto said = [](auto change) {
    TransferFlags flags;
    change(flags);
    const Result<TransferOptions> options = parse_options(flags);
    return options ? std::string("accepted") : options.error().what;
  };
  EXPECT_THAT(said([](auto& f) { f.path = "rdma"; }), HasSubstr("--path is 'rdma'; allowed: one or more of auto, shm"));
  EXPECT_THAT(said([](auto& f) { f.path = "auto,auto"; }), HasSubstr("each once"));
  EXPECT_THAT(said([](auto& f) { f.path = ""; }), HasSubstr("--path"));
  EXPECT_THAT(said([](auto& f) { f.memory = "gpu"; }), HasSubstr("kvferry, foreign"));
  EXPECT_THAT(said([](auto& f) { f.op = "push,"; }), HasSubstr("push, pull"));
  EXPECT_THAT(said([](auto& f) { f.peers = "gloo"; }), HasSubstr("nixl, mooncake, ucx"));
  EXPECT_THAT(said([](auto& f) { f.block_bytes = "4KB"; }), HasSubstr("--block-bytes: '4KB'"));
  EXPECT_THAT(said([](auto& f) { f.block_bytes = "100"; }), HasSubstr("multiples of 8"));
  EXPECT_THAT(said([](auto& f) { f.blocks = "0"; }), HasSubstr("--blocks is '0'; allowed: a whole number from 1 to"));
  EXPECT_THAT(said([](auto& f) { f.blocks = "1e3"; }), HasSubstr("--blocks"));
  EXPECT_THAT(said([](auto& f) { f.repeat = "-1"; }), HasSubstr("--repeat is '-1'; allowed: a whole number from 1 to"));
  EXPECT_THAT(said([](auto& f) { f.listen = "nowhere"; }), HasSubstr("HOST:PORT"));
  EXPECT_THAT(said([](auto& f) { f.connect = "host:99999"; }), HasSubstr("HOST:PORT"));
  EXPECT_THAT(said([](auto& f) { f.listen = f.connect = "a:1"; }), HasSubstr("exclude each other"));
  EXPECT_THAT(said([](auto& f) { f.plot_file = "/tmp/a.pdf"; }), HasSubstr(".png"));
  EXPECT_THAT(said([](auto& f) { f.json_file = "/nonexistent/a.json"; }), HasSubstr("folder that exists"));
  EXPECT_THAT(said([](auto& f) { f.model = "gpt"; }), HasSubstr("--model"));
  EXPECT_THAT(said([](auto& f) { f.model = "qwen3-32b", f.tokens = "many"; }), HasSubstr("--tokens"));
  EXPECT_THAT(said([](auto& f) { f.block_bytes = "1GiB", f.blocks = "100000"; }), HasSubstr("lower --blocks"));
}

TEST(Rows, TheTableComparesWithKvferrysRowOfTheSameKind) {
  Row own{.engine = "kvferry", .setting = "default", .path = "auto", .memory = "kvferry", .op = "push"};
  own.block_bytes = 4096;
  own.num_blocks = 2;
  own.gb_per_s = 6;
  own.verified = true;
  Row other = own;
  other.engine = "nixl";
  other.gb_per_s = 1.5;
  other.verified = false;
  Row one_thread = own;
  one_thread.setting = "1 thread";
  one_thread.gb_per_s = 4;
  const std::string table = table_of({own, one_thread, other});
  EXPECT_THAT(table, HasSubstr("push, path auto, kvferry memory"));
  EXPECT_THAT(table, HasSubstr("1.50x"));
  EXPECT_THAT(table, HasSubstr("4.00x"));
  EXPECT_THAT(table, HasSubstr("NO"));
  const nlohmann::json row = other;
  EXPECT_EQ(row.size(), 13U);
  EXPECT_EQ(row.at("verified"), false);
}

TEST(Rows, TheTablesColumnsHaveRoomForTheLongestName) {
  Row own{.engine = "kvferry", .setting = "default", .path = "tcp", .memory = "kvferry", .op = "push"};
  Row member = own;
  member.setting = "member, granted";
  std::istringstream table(table_of({own, member}));
  std::vector<std::size_t> widths;
  for (std::string line; std::getline(table, line);)
    if (line.ends_with("NO") || line.ends_with("verified")) widths.push_back(line.rfind("  "));
  EXPECT_THAT(widths, ElementsAre(widths.at(0), widths.at(0), widths.at(0)));
}

TEST(LineLink, HexIsCheckedBothWays) {
  const std::string bytes("\0\xff\x10z", 4);
  EXPECT_EQ(to_hex(bytes), "00ff107a");
  EXPECT_EQ(from_hex("00ff107a").value(), bytes);
  EXPECT_FALSE(from_hex("0"));
  EXPECT_FALSE(from_hex("0g"));
}

TEST(LineLink, ErrorsArriveAsErrors) {
  const Result<nlohmann::json> known = checked(to_json(Error{ErrorCode::kRefused, "no"}));
  EXPECT_EQ(known.error().code, ErrorCode::kRefused);
  EXPECT_EQ(known.error().what, "no");
  EXPECT_EQ(checked(nlohmann::json{{"error", 5}, {"code", "x"}}).error().code, ErrorCode::kInternal);
}

TEST(LineLink, SaysWhyItCannotSendOrReceive) {
  int ends[2] = {-1, -1};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  std::signal(SIGPIPE, SIG_IGN);
  LineLink alone{OwnedFd(ends[0])};
  ::close(ends[1]);
  for (const Error& error : {alone.send({}).error(), alone.receive(kSecond).error()}) {
    EXPECT_EQ(error.code, ErrorCode::kPeerLost);
    EXPECT_EQ(error.what, "the benchmark's other process has closed the connection");
  }
  const Error full = LineLink(OwnedFd(), OwnedFd(::open("/dev/full", O_WRONLY | O_CLOEXEC))).send({}).error();
  EXPECT_EQ(full.code, ErrorCode::kUnavailable);
  EXPECT_EQ(full.what, "can't send to the benchmark's other process: No space left on device");
  const Error folder = LineLink(OwnedFd(::open("/", O_RDONLY | O_CLOEXEC))).receive(kSecond).error();
  EXPECT_EQ(folder.code, ErrorCode::kUnavailable);
  EXPECT_EQ(folder.what, "can't receive from the benchmark's other process: Is a directory");
}

TEST(ChildProcess, KeepsItsStatusForLaterWaits) {
  ChildProcess failed({.words = {"sh", "-c", "exit 3"}, .environment = {}});
  EXPECT_EQ(failed.wait(20 * kSecond), 3);
  EXPECT_EQ(failed.wait(0), 3);
  ChildProcess killed({.words = {"sleep", "60"}, .environment = {}});
  killed.kill();
  EXPECT_EQ(killed.wait(0), 128 + SIGKILL);
}

TEST(FiguresFile, SaysWhichFileCannotBeWrittenAndWhy) {
  const auto why = [](const std::string& name) {
    const Result<void> done = attempt([&] { write_json(name, {{"a", 1}}); });
    return done ? std::string() : done.error().what;
  };
  EXPECT_EQ(why(""), "");
  EXPECT_EQ(why("/dev/null"), "");
  EXPECT_EQ(why("/dev/full"), "can't write the figures to /dev/full: No space left on device");
  EXPECT_EQ(why("/nowhere/a.json"), "can't write the figures to /nowhere/a.json: No such file or directory");
}

}  // namespace
}  // namespace kvferry::bench
