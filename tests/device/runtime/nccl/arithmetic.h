// Reductions, element by element and in rank order, in the type of the elements, as NCCL's kernels have them:
// a mean of floating-point numbers scales each contribution before it is added, and a maximum passes over NaN.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "nccl.h"

namespace pretended {

// Bytes of an element.
inline size_t width(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
        case ncclFloat8e4m3:
        case ncclFloat8e5m2: return 1;
        case ncclFloat16:
        case ncclBfloat16: return 2;
        case ncclInt32:
        case ncclUint32:
        case ncclFloat32: return 4;
        case ncclInt64:
        case ncclUint64:
        case ncclFloat64: return 8;
    }
    return 0;
}

// A reduction, and the factor that each contribution is scaled by first.
struct Reduction {
    ncclRedOp_t operation;
    std::optional<double> factor;
};

template <class T>
T combined(T a, T b, ncclRedOp_t operation) {
    constexpr bool exact = std::is_integral_v<T>;
    switch (operation) {
        case ncclProd: return static_cast<T>(a * b);
        case ncclMax:
            if constexpr (exact)
                return b > a ? b : a;
            else
                return std::is_same_v<T, double> ? T(std::fmax(a, b)) : T(std::fmax(float(a), float(b)));
        case ncclMin:
            if constexpr (exact)
                return b < a ? b : a;
            else
                return std::is_same_v<T, double> ? T(std::fmin(a, b)) : T(std::fmin(float(a), float(b)));
        default: return static_cast<T>(a + b);
    }
}

template <class T>
void reduce_as(const std::vector<std::vector<char>>& contributions, char* to, size_t count, Reduction reduction) {
    const auto num_ranks = contributions.size();
    const bool averages = reduction.operation == ncclAvg;
    if (averages && !std::is_integral_v<T>) reduction.factor = 1.0 / static_cast<double>(num_ranks);
    for (size_t i = 0; i < count; i++) {
        T result{};
        for (size_t rank = 0; rank < num_ranks; rank++) {
            T value;
            memcpy(&value, contributions[rank].data() + i * sizeof(T), sizeof(T));
            if (reduction.factor) value = static_cast<T>(value * static_cast<T>(*reduction.factor));
            result = rank ? combined(result, value, reduction.operation) : value;
        }
        if constexpr (std::is_integral_v<T>) {
            if (averages) result = static_cast<T>(result / static_cast<T>(num_ranks));
        }
        memcpy(to + i * sizeof(T), &result, sizeof(T));
    }
}

// False: NCCL reduces no such type.
inline bool reduce(const std::vector<std::vector<char>>& contributions, char* to, size_t count, ncclDataType_t type,
                   Reduction reduction) {
    switch (type) {
        case ncclInt8: reduce_as<int8_t>(contributions, to, count, reduction); return true;
        case ncclUint8: reduce_as<uint8_t>(contributions, to, count, reduction); return true;
        case ncclInt32: reduce_as<int32_t>(contributions, to, count, reduction); return true;
        case ncclUint32: reduce_as<uint32_t>(contributions, to, count, reduction); return true;
        case ncclInt64: reduce_as<int64_t>(contributions, to, count, reduction); return true;
        case ncclUint64: reduce_as<uint64_t>(contributions, to, count, reduction); return true;
        case ncclFloat16: reduce_as<c10::Half>(contributions, to, count, reduction); return true;
        case ncclBfloat16: reduce_as<c10::BFloat16>(contributions, to, count, reduction); return true;
        case ncclFloat32: reduce_as<float>(contributions, to, count, reduction); return true;
        case ncclFloat64: reduce_as<double>(contributions, to, count, reduction); return true;
        default: return false;
    }
}

}  // namespace pretended
