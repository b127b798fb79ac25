# UNICRON_CUDA=AUTO|ON|OFF: AUTO takes CUDA where a compiler works, ON insists, OFF never looks.
#
# nvcc compiles the kernels to one image, which is embedded and loaded by the driver at run time; nothing of CUDA is
# linked, so a build with CUDA imports on a machine without a GPU. Sets UNICRON_HAS_CUDA and UNICRON_KERNEL_IMAGE.
set(UNICRON_CUDA AUTO CACHE STRING "Build the CUDA kernels: AUTO, ON or OFF")
set_property(CACHE UNICRON_CUDA PROPERTY STRINGS AUTO ON OFF)
set(UNICRON_HAS_CUDA OFF)
set(UNICRON_KERNEL_IMAGE kernel_image_none.cc)

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

# 80-real: machine code; 80-virtual: code for later GPUs; 80: both.
function(unicron_gencode result)
  set(flags "")
  foreach(entry IN LISTS CMAKE_CUDA_ARCHITECTURES)
    string(REGEX MATCH "^[0-9]+a?" number "${entry}")
    if(NOT entry MATCHES "-virtual$")
      list(APPEND flags -gencode arch=compute_${number},code=sm_${number})
    endif()
    if(NOT entry MATCHES "-real$")
      list(APPEND flags -gencode arch=compute_${number},code=compute_${number})
    endif()
  endforeach()
  set(${result} ${flags} PARENT_SCOPE)
endfunction()

if(UNICRON_HAS_CUDA)
  set(gpu ${PROJECT_SOURCE_DIR}/csrc/gpu)
  set(image ${PROJECT_BINARY_DIR}/kernels.fatbin)
  set(UNICRON_KERNEL_IMAGE ${PROJECT_BINARY_DIR}/kernel_image.cc)
  unicron_gencode(gencode)
  add_custom_command(OUTPUT ${image}
    COMMAND ${CMAKE_CUDA_COMPILER} -fatbin -std=c++17 -O3 --Werror all-warnings -I ${gpu}/include ${gencode}
            ${gpu}/kernels/kernels.cu -o ${image}
    DEPENDS ${gpu}/kernels/kernels.cu ${gpu}/include/gpu/arithmetic.h VERBATIM)
  add_custom_command(OUTPUT ${UNICRON_KERNEL_IMAGE}
    COMMAND ${CMAKE_COMMAND} -DIMAGE=${image} -DSOURCE=${UNICRON_KERNEL_IMAGE}
            -P ${PROJECT_SOURCE_DIR}/cmake/EmbedImage.cmake
    DEPENDS ${image} ${PROJECT_SOURCE_DIR}/cmake/EmbedImage.cmake VERBATIM)
endif()
