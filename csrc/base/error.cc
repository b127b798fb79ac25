#include "base/error.h"

#include <system_error>

namespace unicron {

Error system_error(const std::string& what, int error_number) {
  // std::generic_category, because strerror is not thread-safe.
  return Error(ErrorCode::kSystem, what + ": " + std::generic_category().message(error_number));
}

}  // namespace unicron
