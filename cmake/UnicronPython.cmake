# The Python module: bindings over every layer.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module REQUIRED)
if(NOT pybind11_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE pybind11_missing)
  if(pybind11_missing)
    message(FATAL_ERROR "pybind11 is missing; run: ${Python_EXECUTABLE} -m pip install pybind11")
  endif()
endif()
find_package(pybind11 2.12 CONFIG REQUIRED)

set(bindings ${PROJECT_SOURCE_DIR}/csrc/bindings)
pybind11_add_module(_core NO_EXTRAS
  ${bindings}/module.cc ${bindings}/register_errors.cc ${bindings}/register_gpu.cc
  ${bindings}/register_liveness.cc ${bindings}/register_monitor.cc
  ${bindings}/register_nccl.cc ${bindings}/register_planner.cc ${bindings}/register_state.cc
  ${bindings}/register_statistics.cc)
target_compile_definitions(_core PRIVATE UNICRON_VERSION="${PROJECT_VERSION}")
target_link_libraries(_core PRIVATE unicron_flags unicron_gpu unicron_monitor unicron_planner unicron_state)
