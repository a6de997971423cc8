#include "transport/base/result.h"

namespace kvferry {

std::string_view name_of(ErrorCode code) {
  switch (code) {
    case ErrorCode::kOk:
      return "ok";
    case ErrorCode::kInvalidArgument:
      return "invalid argument";
    case ErrorCode::kNotFound:
      return "not found";
    case ErrorCode::kFull:
      return "full";
    case ErrorCode::kTimeout:
      return "timed out";
    case ErrorCode::kCancelled:
      return "cancelled";
    case ErrorCode::kPeerLost:
      return "peer lost";
    case ErrorCode::kCorrupt:
      return "corrupt";
    case ErrorCode::kRefused:
      return "refused";
    case ErrorCode::kUnavailable:
      return "unavailable";
    case ErrorCode::kInternal:
      return "internal error";
  }
  return "unknown error";
}

std::string Error::str() const { return fmt::format("{} [{}:{}]", what, where.file, where.line); }

}  // namespace kvferry
