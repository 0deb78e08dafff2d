// Reports to whoever listens: one function at a time.
#include <atomic>

#include "../runtime.h"
#include "devices.h"

using Listener = void (*)(const char*, const char*);
static std::atomic<Listener> g_listener{nullptr};

EXPORTED void pretended_listen(Listener listener) { g_listener = listener; }

EXPORTED void pretended_tell(const char* kind, const char* detail) {
    if (const auto listener = g_listener.load()) listener(kind, detail);
}
