# Compiler flags of this project's own targets (an interface target, so that third parties keep theirs).
find_package(Threads REQUIRED)

option(UNICRON_WERROR "Warnings are errors (turn it off for a compiler that this project does not know yet)" ON)

add_library(unicron_flags INTERFACE)
target_compile_features(unicron_flags INTERFACE cxx_std_17)
target_compile_options(unicron_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Wconversion -Wshadow $<$<BOOL:${UNICRON_WERROR}>:-Werror>
    -fvisibility=hidden -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>)
target_link_libraries(unicron_flags INTERFACE Threads::Threads)
