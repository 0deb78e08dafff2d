// The few functions of the driver that torch calls by itself; the others return an error.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int cuInit(unsigned) { return 0; }

EXPORTED int cuGetErrorString(int, const char** text) {
    *text = "an error of the pretended driver";
    return 0;
}

EXPORTED int cuDeviceGetAttribute(int* value, int, int) {
    *value = 0;
    return 0;
}

EXPORTED int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return 0;
}
