// The C++ exception that nobody catches: its text reaches the agent although the process ends by SIGABRT.
//
// gloo, NCCL's plug-ins and whatever else a script loads may throw in a thread of their own. The runtime then calls
// std::terminate and all that is left is a line in stderr, if that goes anywhere. The pulse page outlives the process.
#pragma once

#include "monitor/pulse.h"

namespace unicron::monitor {

// From now on std::terminate leaves its text in this page, then does what it did before. One page a process: a later
// call replaces the page.
void leave_last_words_in(const PulsePagePtr& page);

}  // namespace unicron::monitor
