// A shared library opened at run time, so that one build runs with and without it.
#pragma once

#include <string>
#include <vector>

namespace unicron {

// The first of `names` that can be opened, or null with the reason in `*why`. Never closed: drivers start threads.
void* open_library(const std::vector<std::string>& names, std::string* why);

// Null when the library does not have it.
void* find_symbol(void* library, const char* name);

}  // namespace unicron
