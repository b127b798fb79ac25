// unicron._core: the only code that knows both C++ and Python.
//
// Integers, floats, strings, bytes and buffers cross; native threads never call Python; every call that may block
// releases the GIL and takes timeout_ms. python/unicron/_core.pyi is the interface; tests/typing compares.
#include "register.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The native core of unicron.";
  module.attr("__version__") = UNICRON_VERSION;
  unicron::bindings::register_errors(module);
  unicron::bindings::register_gpu(module);
  unicron::bindings::register_nccl(module);
  unicron::bindings::register_monitor(module);
  unicron::bindings::register_liveness(module);
  unicron::bindings::register_planner(module);
  unicron::bindings::register_state(module);
  unicron::bindings::register_statistics(module);
}
