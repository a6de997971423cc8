#include "kernels/transpose.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <vector>

namespace kvferry {
namespace {

template <class T>
class Transpose : public ::testing::Test {};
using Sizes = ::testing::Types<std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>;
TYPED_TEST_SUITE(Transpose, Sizes);

/// Checks every element and that nothing is written between the rows. `gap`: number of elements between two rows.
template <class T>
void check(std::size_t rows, std::size_t cols, std::size_t gap) {
  const std::size_t from_stride = cols + gap, to_stride = rows + gap;
  std::vector<T> from(rows * from_stride), to(cols * to_stride, T{99}), expected = to;
  std::iota(from.begin(), from.end(), T{1});
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c) expected[c * to_stride + r] = from[r * from_stride + c];
  transpose<T>(reinterpret_cast<const std::byte*>(from.data()), static_cast<std::int64_t>(from_stride * sizeof(T)),
               reinterpret_cast<std::byte*>(to.data()), static_cast<std::int64_t>(to_stride * sizeof(T)), rows, cols);
  EXPECT_EQ(to, expected) << rows << " x " << cols << ", gap " << gap;
}

TYPED_TEST(Transpose, WholeTilesOf64Bytes) {
  for (const std::size_t gap : {0, 1, 8}) {
    check<TypeParam>(64, 64, gap);
    check<TypeParam>(128, 64, gap);
    check<TypeParam>(64, 192, gap);
  }
}

TYPED_TEST(Transpose, WholeTilesOf16BytesOnly) {
  check<TypeParam>(48, 16, 3);
  check<TypeParam>(16, 80, 0);
}

TYPED_TEST(Transpose, OddSizes) {
  for (std::size_t rows = 1; rows < 40; rows += 3)
    for (std::size_t cols = 1; cols < 40; cols += 4) check<TypeParam>(rows, cols, 2);
}

}  // namespace
}  // namespace kvferry
