# UNICRON_CUDA=AUTO|ON|OFF: AUTO takes CUDA where a compiler works, ON insists, OFF never looks.
#
# The CUDA runtime is linked statically and the driver is loaded at run time, so a build with CUDA imports on a machine
# without a GPU. Sets UNICRON_HAS_CUDA.
set(UNICRON_CUDA AUTO CACHE STRING "Build the CUDA sources: AUTO, ON or OFF")
set_property(CACHE UNICRON_CUDA PROPERTY STRINGS AUTO ON OFF)
set(UNICRON_HAS_CUDA OFF)

if(NOT UNICRON_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "UNICRON_CUDA is '${UNICRON_CUDA}'; give AUTO, ON or OFF")
endif()

if(NOT UNICRON_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    # An unset standard inherits C++20 from newer nvcc's host defaults and generation fails with CMake 3.25.
    set(CMAKE_CUDA_STANDARD 17)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
      set(CMAKE_CUDA_ARCHITECTURES 80-real 90)
    endif()
    enable_language(CUDA)
    set(UNICRON_HAS_CUDA ON)
  elseif(UNICRON_CUDA STREQUAL "ON")
    message(FATAL_ERROR "UNICRON_CUDA=ON, but no working CUDA compiler was found; put nvcc on PATH, set CUDACXX, "
                        "or configure with UNICRON_CUDA=OFF")
  endif()
endif()
