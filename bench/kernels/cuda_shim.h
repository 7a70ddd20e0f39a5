// Enough of CUDA for a serial run of a kernel on the CPU: one thread after the other.
// Kernels that share memory between threads, or wait for each other, do not fit here.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)

struct uint3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

static uint3 gridDim, blockDim, blockIdx, threadIdx;

template <typename T> static inline T __ldcs(const T* from) { return *from; }
template <typename T> static inline void __stcs(T* to, T value) { *to = value; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __uint_as_float(unsigned bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline unsigned __float_as_uint(float f) { unsigned bits; memcpy(&bits, &f, 4); return bits; }

template <typename... Arguments>
static void run_serially(void (*kernel)(Arguments...), unsigned blocks, unsigned threads,
                         Arguments... arguments) {
    gridDim = {blocks, 1, 1};
    blockDim = {threads, 1, 1};
    for (unsigned block = 0; block < blocks; block++)
        for (unsigned thread = 0; thread < threads; thread++) {
            blockIdx = {block, 0, 0};
            threadIdx = {thread, 0, 0};
            kernel(arguments...);
        }
}
