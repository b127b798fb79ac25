#include "base/shared_library.h"

#include <dlfcn.h>

namespace unicron {

void* open_library(const std::vector<std::string>& names, std::string* why) {
  why->clear();
  for (const std::string& name : names) {
    if (name.empty()) continue;
    if (void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)) return library;
    const char* error = ::dlerror();
    if (!why->empty()) *why += "; ";
    *why += error != nullptr ? error : name + ": cannot be opened";
  }
  return nullptr;
}

void* find_symbol(void* library, const char* name) { return ::dlsym(library, name); }

}  // namespace unicron
