// Copies between the host and devices, of which the host knows nothing until it waits.
#pragma once

#include <cstddef>

#include "streams.h"

namespace pretended {

// Finish the copies that happened before. False, and a report: pinned memory changed during one.
bool finish_copies(const Clock& clock);

// Finish the copies from or into memory that is about to be freed.
void finish_copies(const char* address, size_t bytes);

// Whether the last that this thread did was a copy on the stream that waited for it: not counted a second time.
// Forgotten when asked.
bool copy_has_waited(const Stream* stream);

}  // namespace pretended
