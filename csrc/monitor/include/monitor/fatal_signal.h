// A signal that ends the process is known before the process has ended.
//
// Between the fault and the death lies what the process still does: faulthandler writes the stacks of all threads, the
// kernel a core file (of all its memory: seconds, and the robust mutex is released only after it). Others need not wait
// for that; who takes its memory over waits for the death itself all the same.
#pragma once

#include "monitor/pulse.h"

namespace unicron::monitor {

// From now on SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT are first announced in the process's page (once it has one),
// then do what they did before. To be called before the script's libraries come: one that handles such a signal itself
// (a Java machine, say) then does so first, and nothing is announced.
void announce_fatal_signals();

// One page a process: a later call replaces the page.
void announce_in(const PulsePagePtr& page);

}  // namespace unicron::monitor
