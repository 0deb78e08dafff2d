// Devices of the machine, as the runtime and the management library both know them.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace pretended {

// Of the machine: PRETENDED_DEVICES, or 4.
inline int machine_devices() {
    const char* text = getenv("PRETENDED_DEVICES");
    return text ? atoi(text) : 4;
}

// The first byte tells devices apart, so that the beginning of an identity is enough, as with real ones.
inline void uuid_bytes(int device, unsigned char* bytes) {
    for (int i = 0; i < 16; i++) bytes[i] = 0;
    bytes[0] = static_cast<unsigned char>(16 * (device + 1));
    bytes[15] = static_cast<unsigned char>(device);
}

inline std::string uuid(int device) {
    unsigned char bytes[16];
    uuid_bytes(device, bytes);
    std::string text = "GPU-";
    for (int i = 0; i < 16; i++) {
        char hex[4];
        snprintf(hex, sizeof hex, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", bytes[i]);
        text += hex;
    }
    return text;
}

}  // namespace pretended
