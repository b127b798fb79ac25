# One static library and one include root per layer: what a layer does not declare in DEPENDS is not on its include
# path, so an undeclared include stops the build.
#
#   unicron_add_layer(monitor SOURCES pulse.cc ... DEPENDS base)
#
# The layer's headers lie in csrc/<layer>/include/<layer>/ and are included as "<layer>/<file>.h".
function(unicron_add_layer layer)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  set(root ${PROJECT_SOURCE_DIR}/csrc/${layer})
  list(TRANSFORM ARG_SOURCES PREPEND ${root}/ REGEX "^[^/]")  # generated sources have whole paths
  add_library(unicron_${layer} STATIC ${ARG_SOURCES})
  target_include_directories(unicron_${layer} PUBLIC ${root}/include)
  target_link_libraries(unicron_${layer} PRIVATE unicron_flags)
  foreach(dependency IN LISTS ARG_DEPENDS)
    target_link_libraries(unicron_${layer} PUBLIC unicron_${dependency})
  endforeach()
endfunction()
