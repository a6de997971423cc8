// Tests signatures against a vector of RFC 8032, and that any change makes them invalid.
#include "transport/base/net/tls/signatures.h"

#include <gtest/gtest.h>

namespace kvferry::net {
namespace {

const Bytes32 kSecret = bytes32_of_hex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb").value();
const Bytes32 kPublic = bytes32_of_hex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c").value();
const std::string kSignature = bytes_of_hex(
                                   "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
                                   "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00")
                                   .value();

TEST(Signatures, AreThoseOfTheStandard) {
  EXPECT_EQ(signature_of(kSecret, "r"), kSignature);
  EXPECT_EQ(certificate_public(kSecret), kPublic);
  EXPECT_TRUE(is_signed_by(kPublic, "r", kSignature));
}

TEST(Signatures, ASignatureIsOfOneTextByOneKey) {
  EXPECT_FALSE(is_signed_by(kPublic, "s", kSignature));
  EXPECT_FALSE(is_signed_by(kPublic, "", kSignature));
  EXPECT_FALSE(is_signed_by(certificate_public({1}), "r", kSignature));
  EXPECT_FALSE(is_signed_by({}, "r", kSignature));
  for (std::size_t at = 0; at < kSignature.size(); ++at) {
    std::string changed = kSignature;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    EXPECT_FALSE(is_signed_by(kPublic, "r", changed)) << at;
    EXPECT_FALSE(is_signed_by(kPublic, "r", kSignature.substr(0, at)));
  }
  EXPECT_FALSE(is_signed_by(kPublic, "r", kSignature + '0'));
}

}  // namespace
}  // namespace kvferry::net
