// Keys or values of one head of one block, as 8-bit numbers with one scale, and back.
// A packed piece is a 16-byte head (the scale as float32, zeros) and tokens * dim bytes; the other
// side is bfloat16, rows of `dim` numbers `token_stride` bytes apart. int8: x = q * scale, q in
// [-127, 127]. fp8: q is e4m3, largest 448. Not finite: NaN becomes 0, infinity the largest.
// Every result is rounded once, to nearest even: the same bits as the reference in numpy.

typedef unsigned long long u64;
typedef unsigned char u8;
typedef unsigned short u16;

static __device__ __forceinline__ float from_bf16(u16 bits) {
    return __uint_as_float((unsigned)bits << 16);
}

static __device__ __forceinline__ u16 to_bf16(float value) {
    unsigned bits = __float_as_uint(value);
    return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// `value` is finite or infinite, never NaN.
static __device__ __forceinline__ u8 to_e4m3(float value) {
    unsigned bits = __float_as_uint(value);
    unsigned sign = (bits >> 24) & 0x80, rest = bits & 0x7fffffff;
    if (rest >= 0x43e00000) return (u8)(sign | 0x7e);  // 448 and beyond
    if (rest < 0x3c800000) {                           // below 2^-6: steps of 2^-9
        float steps = rintf(__fmul_rn(__uint_as_float(rest), 512.0f));
        return (u8)(sign | (unsigned)steps);
    }
    rest += 0x7ffff + ((rest >> 20) & 1);
    rest = (rest >> 20) - ((127 - 7) << 3);
    return (u8)(sign | (rest > 0x7e ? 0x7e : rest));
}

static __device__ __forceinline__ float from_e4m3(u8 bits) {
    unsigned exponent = (bits >> 3) & 15, fraction = bits & 7;
    float value = exponent ? __uint_as_float(((exponent + 127 - 7) << 23) | (fraction << 20))
                           : __fmul_rn((float)fraction, 1.0f / 512.0f);
    return bits & 0x80 ? -value : value;
}

static __device__ __forceinline__ bool is_finite(float value) {
    return (__float_as_uint(value) & 0x7f800000) != 0x7f800000;
}

static __device__ __forceinline__ u8 packed(float value, float scale, u64 is_fp8) {
    if (value != value || scale == 0.0f) return 0;
    float q = __fdiv_rn(value, scale);
    if (is_fp8) return to_e4m3(q);
    q = rintf(q);
    q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
    return (u8)(signed char)(int)q;
}

// One thread a piece: the scale into its head.
extern "C" __global__ void __launch_bounds__(1024, 1) scale_pieces(
    u64 packs, u64 rows, u64 count, u64 tokens, u64 dim, u64 token_stride, u64 is_fp8) {
    for (u64 piece = blockIdx.x * (u64)blockDim.x + threadIdx.x; piece < count;
         piece += gridDim.x * (u64)blockDim.x) {
        const u8* from = (const u8*)((const u64*)rows)[piece];
        float most = 0.0f;
        for (u64 token = 0; token < tokens; token++) {
            const u16* row = (const u16*)(from + token * token_stride);
            for (u64 i = 0; i < dim; i++) {
                float size = __uint_as_float(__float_as_uint(from_bf16(row[i])) & 0x7fffffff);
                if (is_finite(size) && size > most) most = size;
            }
        }
        unsigned* head = (unsigned*)((const u64*)packs)[piece];
        head[0] = __float_as_uint(__fdiv_rn(most, is_fp8 ? 448.0f : 127.0f));
        head[1] = head[2] = head[3] = 0;
    }
}

// A group of threads a piece, 16 numbers a thread at a time.
#define GROUP 64u
#define AT_ONCE 16u

// Where a run of 16 numbers lies: it may go on in the next row.
struct Place {
    u8* row;
    u64 token_stride;
    unsigned dim, column;

    __device__ __forceinline__ Place(u64 rows, u64 stride, unsigned size, unsigned at)
        : row((u8*)rows + at / size * stride), token_stride(stride), dim(size), column(at % size) {}

    __device__ __forceinline__ u16* next() {
        u16* here = (u16*)row + column;
        if (++column == dim) { column = 0; row += token_stride; }
        return here;
    }
    // Whether it can be written in two words of 16 bytes.
    __device__ __forceinline__ bool is_plain() const {
        return column + AT_ONCE <= dim && !(((u64)row + 2 * column) & 15);
    }
};

static __device__ __forceinline__ u16 restored(unsigned byte, float scale, bool is_fp8) {
    float q = is_fp8 ? from_e4m3((u8)byte) : (float)(signed char)byte;
    return to_bf16(__fmul_rn(q, scale));
}

static __device__ __forceinline__ unsigned pair(unsigned bytes, float scale, bool is_fp8) {
    return restored(bytes & 255, scale, is_fp8) |
           (unsigned)restored(bytes >> 8 & 255, scale, is_fp8) << 16;
}

static __device__ __forceinline__ void unpack(Place place, uint4 codes, float scale, bool is_fp8) {
    if (place.is_plain()) {
        uint4* to = (uint4*)place.next();
        __stcs(to, uint4{pair(codes.x, scale, is_fp8), pair(codes.x >> 16, scale, is_fp8),
                         pair(codes.y, scale, is_fp8), pair(codes.y >> 16, scale, is_fp8)});
        __stcs(to + 1, uint4{pair(codes.z, scale, is_fp8), pair(codes.z >> 16, scale, is_fp8),
                             pair(codes.w, scale, is_fp8), pair(codes.w >> 16, scale, is_fp8)});
        return;
    }
    #pragma unroll 1
    for (unsigned i = 0; i < AT_ONCE; i++) {
        unsigned word = i < 8 ? (i < 4 ? codes.x : codes.y) : (i < 12 ? codes.z : codes.w);
        *place.next() = restored(word >> (8 * (i % 4)) & 255, scale, is_fp8);
    }
}

static __device__ __forceinline__ unsigned pack(Place& place, float scale, bool is_fp8) {
    unsigned word = 0;
    #pragma unroll 1
    for (unsigned shift = 0; shift < 32; shift += 8)
        word |= (unsigned)packed(from_bf16(*place.next()), scale, is_fp8) << shift;
    return word;
}

// After `scale_pieces`.
extern "C" __global__ void __launch_bounds__(1024, 1) quantise_pieces(
    u64 packs, u64 rows, u64 count, u64 tokens, u64 dim, u64 token_stride, u64 is_fp8) {
    const unsigned width = blockDim.x < GROUP ? blockDim.x : GROUP;
    const unsigned groups = blockDim.x / width, size = tokens * dim;
    for (u64 piece = blockIdx.x * (u64)groups + threadIdx.x / width; piece < count;
         piece += gridDim.x * (u64)groups) {
        u8* to = (u8*)((const u64*)packs)[piece];
        const u64 from = ((const u64*)rows)[piece];
        float scale = __uint_as_float(*(const unsigned*)to);
        for (unsigned at = AT_ONCE * (threadIdx.x % width); at < size; at += AT_ONCE * width) {
            Place place(from, token_stride, dim, at);
            unsigned a = pack(place, scale, is_fp8), b = pack(place, scale, is_fp8);
            unsigned c = pack(place, scale, is_fp8), d = pack(place, scale, is_fp8);
            __stcs((uint4*)(to + 16 + at), uint4{a, b, c, d});
        }
    }
}

// The way back.
extern "C" __global__ void __launch_bounds__(1024, 1) restore_pieces(
    u64 packs, u64 rows, u64 count, u64 tokens, u64 dim, u64 token_stride, u64 is_fp8) {
    const unsigned width = blockDim.x < GROUP ? blockDim.x : GROUP;
    const unsigned groups = blockDim.x / width, size = tokens * dim;
    for (u64 piece = blockIdx.x * (u64)groups + threadIdx.x / width; piece < count;
         piece += gridDim.x * (u64)groups) {
        const u8* from = (const u8*)((const u64*)packs)[piece];
        const u64 to = ((const u64*)rows)[piece];
        float scale = __uint_as_float(*(const unsigned*)from);
        for (unsigned at = AT_ONCE * (threadIdx.x % width); at < size; at += AT_ONCE * width) {
            Place place(to, token_stride, dim, at);
            unpack(place, __ldcs((const uint4*)(from + 16 + at)), scale, is_fp8);
        }
    }
}
