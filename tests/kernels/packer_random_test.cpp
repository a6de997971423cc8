// Compares the host packer with the plain loop on random shapes, orders, paddings, block tables and token runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/kernels/random_cache.h"
#include "tests/kernels/reference_packer.h"

namespace kvferry {
namespace {

// One test runs many seeds, so that a thousand shapes don't need a thousand processes.
constexpr std::uint32_t kSeedsPerTest = 250;

class PackerRandom : public ::testing::TestWithParam<std::uint32_t> {
 protected:
  template <class Body>
  void for_each_seed(Body body) {
    for (std::uint32_t seed = GetParam() * kSeedsPerTest; seed < (GetParam() + 1) * kSeedsPerTest; ++seed) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      body(seed);
      if (HasFatalFailure()) return;
    }
  }
};

TEST_P(PackerRandom, HostEqualsReferenceBitByBitAndTouchesNothingElse) {
  for_each_seed([](std::uint32_t seed) {
    Random random(seed);
    const CacheShape shape = random_shape(random);
    TestCache by_host(shape), by_reference(shape);
    const std::vector<std::byte> memory = random.bytes(by_host.memory().size());
    by_host.set_memory(memory);
    by_reference.set_memory(memory);
    const ChunkFormat gathered = random_format(random, shape, true);
    const std::unique_ptr<Packer> host = make_host_packer(by_host.layout(), gathered).value();
    const std::unique_ptr<Packer> reference = make_reference_packer(by_reference.layout(), gathered).value();
    auto tables = random_tables(random, shape);
    for (std::vector<BlockId>& table : tables)
      for (BlockId& block : table) block = random.once_in(5) ? kNoBlock : block;
    const TokenRun run = random_run(random, shape.blocks * shape.block_tokens, tables);
    const std::size_t token_bytes = host->chunk_bytes_per_token();

    const std::size_t spare_bytes = random.number(0, 20);
    std::vector<std::byte> host_chunk(run.num_tokens * token_bytes + spare_bytes, std::byte{0xaa});
    std::vector<std::byte> reference_chunk = host_chunk;
    const Result<std::uint64_t> host_checksum = host->gather(run, host_chunk);
    const Result<std::uint64_t> reference_checksum = reference->gather(run, reference_chunk);
    ASSERT_TRUE(host_checksum) << host_checksum.error().what;
    ASSERT_TRUE(reference_checksum) << reference_checksum.error().what;
    ASSERT_EQ(host_chunk, reference_chunk);
    ASSERT_EQ(*host_checksum, *reference_checksum);
    std::vector<std::byte> larger = random.bytes(random.once_in(2) ? kSegmentBytes : random.number(0, 300));
    ChecksumStream whole;
    whole.update(larger);
    ASSERT_EQ(host->gather_part(run, host_chunk, whole).value(), *host_checksum);
    larger.insert(larger.end(), host_chunk.begin(), host_chunk.end() - static_cast<std::ptrdiff_t>(spare_bytes));
    ASSERT_EQ(whole.digest(), chunk_checksum(larger));
    ASSERT_EQ(
        std::count(host_chunk.end() - static_cast<std::ptrdiff_t>(spare_bytes), host_chunk.end(), std::byte{0xaa}),
        static_cast<std::ptrdiff_t>(spare_bytes));
    ASSERT_EQ(by_host.memory(), memory);

    const ChunkFormat scattered = random_format(random, shape, false);
    const std::unique_ptr<Packer> to_host = make_host_packer(by_host.layout(), scattered).value();
    const std::unique_ptr<Packer> to_reference = make_reference_packer(by_reference.layout(), scattered).value();
    const std::uint32_t skip_tokens = random.number(0, 9);
    const std::uint32_t chunk_tokens = skip_tokens + run.num_tokens + random.number(0, 9);
    const std::vector<std::byte> received =
        random.bytes(chunk_tokens * to_host->chunk_bytes_per_token() + random.number(0, 5));
    ASSERT_TRUE(to_host->scatter(received, chunk_tokens, skip_tokens, run));
    ASSERT_TRUE(to_reference->scatter(received, chunk_tokens, skip_tokens, run));
    ASSERT_EQ(by_host.memory(), by_reference.memory());

    by_host.set_memory(memory);
    const Result<std::uint64_t> hashed = to_host->scatter_and_hash(received, chunk_tokens, skip_tokens, run);
    ASSERT_TRUE(hashed) << hashed.error().what;
    ASSERT_EQ(*hashed, chunk_checksum(std::span(received).first(chunk_tokens * to_host->chunk_bytes_per_token())));
    by_reference.set_memory(memory);
    ASSERT_TRUE(to_reference->scatter(received, chunk_tokens, skip_tokens, run));
    ASSERT_EQ(by_host.memory(), by_reference.memory());
  });
}

TEST_P(PackerRandom, KvSurvivesTheMoveToAnotherLayoutAndBlockSize) {
  for_each_seed([](std::uint32_t seed) {
    Random random(seed);
    const CacheShape from = random_shape(random);
    CacheShape to = random_shape(random);
    to.layers = from.layers;
    to.planes = from.planes;
    to.heads = from.heads;
    to.head_dim = from.head_dim;
    to.element_bytes = from.element_bytes;
    to.groups = std::min(to.groups, to.layers);
    TestCache source(from), target(to);
    source.set_memory(random.bytes(source.memory().size()));
    const auto from_tables = random_tables(random, from);
    const auto to_tables = random_tables(random, to);
    const TokenRun from_run = random_run(random, from.blocks * from.block_tokens, from_tables);
    // The target takes some of the chunk's tokens, at a random place of its sequence with enough room.
    const std::uint32_t skip_tokens = random.number(0, from_run.num_tokens);
    const std::uint32_t room = to.blocks * to.block_tokens;
    const std::uint32_t moved = random.number(0, std::min(room, from_run.num_tokens - skip_tokens));
    const TokenRun to_run{random.number(0, room - moved), moved, to_tables};

    const std::unique_ptr<Packer> sender = make_host_packer(source.layout()).value();
    const std::unique_ptr<Packer> receiver = make_host_packer(target.layout()).value();
    std::vector<std::byte> chunk(from_run.num_tokens * sender->layout().bytes_per_token());
    const std::vector<std::byte> untouched(target.memory().size(), std::byte{0x5a});
    target.set_memory(untouched);
    ASSERT_TRUE(sender->gather(from_run, chunk));
    ASSERT_TRUE(receiver->scatter(chunk, from_run.num_tokens, skip_tokens, to_run));

    const std::size_t element_bytes = from.element_bytes;
    std::vector<std::byte> expected = untouched;
    for (std::size_t layer = 0; layer < from.layers; ++layer)
      for (std::size_t head = 0; head < from.heads; ++head)
        for (std::size_t plane = 0; plane < from.planes; ++plane)
          for (std::size_t token = 0; token < moved; ++token)
            for (std::size_t dim = 0; dim < from.head_dim; ++dim) {
              const auto offset = [&](const TestCache& cache, const CacheShape& shape, const TokenRun& run,
                                      std::size_t t) {
                const auto block = run.block_ids[layer % shape.groups][t / shape.block_tokens];
                return cache.offset_of(layer, head, plane, static_cast<std::size_t>(block), t % shape.block_tokens,
                                       dim);
              };
              std::memcpy(&expected[offset(target, to, to_run, to_run.first_token + token)],
                          &source.memory()[offset(source, from, from_run, from_run.first_token + skip_tokens + token)],
                          element_bytes);
            }
    ASSERT_EQ(target.memory(), expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Seeds, PackerRandom, ::testing::Range(0u, 8u));

}  // namespace
}  // namespace kvferry
