// Each area registers its names here; module.cc calls them in order.
#pragma once

#include <pybind11/pybind11.h>

namespace unicron::bindings {

void register_errors(pybind11::module_& module);
void register_gpu(pybind11::module_& module);
void register_liveness(pybind11::module_& module);
void register_monitor(pybind11::module_& module);
void register_nccl(pybind11::module_& module);
void register_planner(pybind11::module_& module);
void register_state(pybind11::module_& module);
void register_statistics(pybind11::module_& module);

}  // namespace unicron::bindings
