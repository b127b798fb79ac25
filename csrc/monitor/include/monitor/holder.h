// The thread that holds a worker's robust mutex for the life of the process, and beats.
//
// Its death is the process's death as the supervisor sees it, so it is never stopped: not by close(), not by an
// exception, not when the object that asked for it is gone.
#pragma once

#include "monitor/pulse.h"

namespace unicron::monitor {

// Returns when this process holds the page's mutex (at once when it already does). Throws kSlotHeld when another living
// process holds it.
void hold_for_life(const PulsePagePtr& page);

}  // namespace unicron::monitor
