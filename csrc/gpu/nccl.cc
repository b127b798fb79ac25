#include "gpu/nccl.h"

#include <mutex>

#include "base/error.h"
#include "base/shared_library.h"

namespace unicron::gpu {

namespace {

constexpr int kVersionMin = 22700;

struct Found {
  NcclApi api;
  int version = 0;
  std::string why_not;
};

// A path that was tried in vain can be followed by another: only a success is final.
std::mutex mutex;
std::vector<std::string> paths{"libnccl.so.2"};
Found found{{}, 0, "not looked for yet"};
bool is_tried = false;

std::string resolve(void* library, NcclApi* api) {
#define UNICRON_RESOLVE(member, name, arguments) \
  api->member = reinterpret_cast<NcclResult(*) arguments>(find_symbol(library, #name));
  UNICRON_NCCL_NEEDED(UNICRON_RESOLVE)
  UNICRON_NCCL_OPTIONAL(UNICRON_RESOLVE)
#undef UNICRON_RESOLVE
  api->error_string = reinterpret_cast<const char* (*)(NcclResult)>(find_symbol(library, "ncclGetErrorString"));
#define UNICRON_REQUIRE(member, name, arguments) \
  if (api->member == nullptr) return #name;
  UNICRON_NCCL_NEEDED(UNICRON_REQUIRE)
#undef UNICRON_REQUIRE
  return "";
}

void load_locked() {
  is_tried = true;
  found = Found{};
  std::string why;
  void* library = open_library(paths, &why);
  if (library == nullptr) {
    found.why_not = "no NCCL: " + why;
    return;
  }
  const std::string missing = resolve(library, &found.api);
  if (found.api.version != nullptr) found.api.version(&found.version);
  if (!missing.empty() || found.version < kVersionMin) {
    found.why_not = "NCCL " + std::to_string(found.version) + " is too old" +
                    (missing.empty() ? std::string() : " (no " + missing + ")") + "; 2.27 or later is needed";
  }
}

const Found& look() {
  const std::lock_guard lock(mutex);
  if (!is_tried) load_locked();
  return found;
}

}  // namespace

void add_nccl_path(const std::string& path) {
  const std::lock_guard lock(mutex);
  if (is_tried && found.why_not.empty()) return;
  paths.push_back(path);
  is_tried = false;
}

const NcclApi* find_nccl() { return look().why_not.empty() ? &found.api : nullptr; }

std::string why_no_nccl() { return look().why_not; }

const NcclApi& nccl() {
  if (!look().why_not.empty()) throw Error(ErrorCode::kNoDevice, found.why_not);
  return found.api;
}

int nccl_version() { return look().version; }

std::vector<std::string> nccl_missing() {
  std::vector<std::string> missing;
  const NcclApi& api = nccl();
#define UNICRON_MISSING(member, name, arguments) \
  if (api.member == nullptr) missing.emplace_back(#name);
  UNICRON_NCCL_OPTIONAL(UNICRON_MISSING)
#undef UNICRON_MISSING
  return missing;
}

std::string nccl_error_text(NcclResult result) {
  const NcclApi& api = nccl();
  const char* text = api.error_string != nullptr ? api.error_string(result) : nullptr;
  return text != nullptr ? text : "NCCL error " + std::to_string(result);
}

void check_nccl(NcclResult result, const std::string& what) {
  if (result == kNcclSuccess || result == kNcclInProgress) return;
  throw Error(ErrorCode::kDevice, what + ": " + nccl_error_text(result));
}

}  // namespace unicron::gpu
