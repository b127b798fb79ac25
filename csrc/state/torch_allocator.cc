#include "state/torch_allocator.h"

#include <algorithm>
#include <exception>
#include <map>
#include <mutex>
#include <vector>

#include "base/error.h"

namespace unicron::state {

namespace {

struct Registry {
  std::mutex mutex;
  std::map<int, std::shared_ptr<GpuArena>> open;
  std::vector<std::shared_ptr<GpuArena>> known;  // every arena that torch may still free from
  std::string last_error;
};

// Never destroyed: torch frees its pools at the very end of the process.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

void forget_unused_locked(Registry& all) {
  const auto is_unused = [&all](const std::shared_ptr<GpuArena>& arena) {
    const auto found = all.open.find(arena->device());
    return (found == all.open.end() || found->second != arena) && arena->pieces().empty();
  };
  all.known.erase(std::remove_if(all.known.begin(), all.known.end(), is_unused), all.known.end());
}

void remember_error(const char* what) noexcept {
  try {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    all.last_error = what;
  } catch (...) {  // no memory for the text: the null pointer says enough
  }
}

void* allocate(size_t nbytes, int device) {
  std::shared_ptr<GpuArena> arena;
  {
    Registry& all = registry();
    const std::lock_guard lock(all.mutex);
    const auto found = all.open.find(device);
    if (found == all.open.end()) {
      throw Error(ErrorCode::kInvalidArgument, "no arena is open on GPU " + std::to_string(device));
    }
    arena = found->second;
  }
  return reinterpret_cast<void*>(static_cast<uintptr_t>(arena->allocate(nbytes)));
}

void release(void* address) {
  const auto wanted = static_cast<gpu::DevicePointer>(reinterpret_cast<uintptr_t>(address));
  std::shared_ptr<GpuArena> arena;
  Registry& all = registry();
  {
    const std::lock_guard lock(all.mutex);
    const auto found = std::find_if(all.known.begin(), all.known.end(),
                                    [wanted](const auto& candidate) { return candidate->contains(wanted); });
    if (found == all.known.end()) throw Error(ErrorCode::kInvalidArgument, "no arena holds the freed address");
    arena = *found;
  }
  arena->free(wanted);
  const std::lock_guard lock(all.mutex);
  forget_unused_locked(all);
}

}  // namespace

void open_arena(const std::shared_ptr<GpuArena>& arena) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.open[arena->device()] = arena;
  if (std::find(all.known.begin(), all.known.end(), arena) == all.known.end()) all.known.push_back(arena);
  forget_unused_locked(all);
}

void close_arena(int device) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.open.erase(device);
  forget_unused_locked(all);
}

std::string last_allocator_error() {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  return all.last_error;
}

}  // namespace unicron::state

void* unicron_arena_malloc(size_t nbytes, int device, void* /*stream*/) {
  try {
    return unicron::state::allocate(nbytes, device);
  } catch (const std::exception& error) {
    unicron::state::remember_error(error.what());
    return nullptr;
  }
}

void unicron_arena_free(void* address, size_t /*nbytes*/, int /*device*/, void* /*stream*/) {
  try {
    unicron::state::release(address);
  } catch (const std::exception& error) {
    unicron::state::remember_error(error.what());
  }
}
