#include "transport/base/fingerprint.h"

#include <gmock/gmock.h>

namespace kvferry {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

const std::string kWhole =
    "model=toy one#0123 kv_dtype=float32 layers=4 kv_heads=2 head_dim=32 chunk_tokens=256 format=1";

std::string with(const std::string& what, const std::string& instead) {
  std::string text = kWhole;
  return text.replace(text.find(what), what.size(), instead);
}

TEST(Fingerprint, FieldsAreReadByName) {
  const auto fields = fingerprint_fields(kWhole);
  EXPECT_EQ(fields.size(), 7u);
  EXPECT_EQ(fields.at("model"), "toy one#0123");
  EXPECT_EQ(fields.at("head_dim"), "32");
  EXPECT_EQ(fields.at("format"), "1");
}

TEST(Fingerprint, WhateverTextIsReadWithoutHarm) {
  for (const char* text : {"", " ", "=", "==", "a=", "a= b=", "no fields", "a=1  b=2", "a=1 b", "=a b=", "a=b=c d=e"})
    fingerprint_fields(text);
  EXPECT_EQ(fingerprint_fields("a= b=2").at("a"), "");
  EXPECT_EQ(fingerprint_fields("a= b=2").at("b"), "2");
  EXPECT_EQ(fingerprint_fields("model=x y=z").at("y"), "z");
}

TEST(Fingerprint, ADraftThatOneSideHasNamesTheSettingThatLeavesItOut) {
  EXPECT_EQ(fingerprint_difference(kWhole, with("chunk_tokens=256", "draft=mtp:a#1 chunk_tokens=256")),
            "draft (a draft model whose KV is in the chunks; with save_draft_kv false it is not) is missing here and "
            "'mtp:a#1' there");
}

TEST(Fingerprint, EachFieldThatDiffersIsNamedWithBothValues) {
  EXPECT_EQ(fingerprint_difference(kWhole, kWhole), "");
  EXPECT_EQ(fingerprint_difference(kWhole, with("layers=4", "layers=6")),
            "layers (layers with attention) is '4' here and '6' there");
  EXPECT_EQ(
      fingerprint_difference("unlike_layers=tensor_parallel:1 layers=4", "unlike_layers=tensor_parallel:2 layers=4"),
      "unlike_layers (the tensor parallel size, which must be equal if layers have KV of unlike shapes) is "
      "'tensor_parallel:1' here and 'tensor_parallel:2' there");
  EXPECT_EQ(fingerprint_difference(kWhole, with("toy one#0123", "other")),
            "model is 'toy one#0123' here and 'other' there");
  EXPECT_THAT(fingerprint_difference(kWhole, with("float32", "fp8")), HasSubstr("'float32' here and 'fp8' there"));
  EXPECT_THAT(fingerprint_difference(kWhole, with("kv_heads=2", "kv_heads=8")), HasSubstr("kv_heads (KV heads)"));
  EXPECT_THAT(fingerprint_difference(kWhole, with("head_dim=32", "head_dim=64")), HasSubstr("head_dim (head size)"));
  EXPECT_THAT(fingerprint_difference(kWhole, with("chunk_tokens=256", "chunk_tokens=64")),
              HasSubstr("'256' here and '64' there"));
  EXPECT_THAT(fingerprint_difference(kWhole, with("format=1", "format=2")), HasSubstr("the chunk format"));
  const std::string two = fingerprint_difference("layers=1 kv_heads=2 format=1", "layers=2 kv_heads=3 format=1");
  EXPECT_THAT(two, HasSubstr("layers"));
  EXPECT_THAT(two, HasSubstr("kv_heads"));
  EXPECT_THAT(two, Not(HasSubstr("format")));
}

TEST(Fingerprint, MissingFieldsAndOtherTextsAreToldToo) {
  EXPECT_EQ(fingerprint_difference("model=a", "model=a rope=1"),
            "rope (the rotary embedding) is missing here and '1' there");
  EXPECT_EQ(fingerprint_difference("one", "another"), "the fingerprint is 'one' here and 'another' there");
}

TEST(Fingerprint, AHostileFingerprintIsPrintableAndCut) {
  const std::string hostile = "model=\x1b[2J\n" + std::string(5000, 'a') + " layers=4";
  const std::string difference = fingerprint_difference(kWhole, hostile);
  EXPECT_THAT(difference, HasSubstr("there"));
  EXPECT_LE(difference.size(), 1024U);
  EXPECT_EQ(difference.find_first_of("\x1b\n"), std::string::npos);
}

TEST(Fingerprint, ChunkTokensAreReadOrNot) {
  EXPECT_EQ(chunk_tokens_of(kWhole), 256u);
  for (const char* text : {"model=a", "chunk_tokens=", "chunk_tokens=0", "chunk_tokens=70000", "chunk_tokens=1x"})
    EXPECT_EQ(chunk_tokens_of(text), std::nullopt) << text;
}

}  // namespace
}  // namespace kvferry
