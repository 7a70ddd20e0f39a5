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
extern "C" __global__ void scale_pieces(u64 packs, u64 rows, u64 count, u64 tokens, u64 dim,
                                        u64 token_stride, u64 is_fp8) {
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

// One thread block a piece, four numbers a thread: after `scale_pieces`.
extern "C" __global__ void quantise_pieces(u64 packs, u64 rows, u64 count, u64 tokens, u64 dim,
                                           u64 token_stride, u64 is_fp8) {
    for (u64 piece = blockIdx.x; piece < count; piece += gridDim.x) {
        u8* to = (u8*)((const u64*)packs)[piece];
        const u8* from = (const u8*)((const u64*)rows)[piece];
        float scale = __uint_as_float(*(const unsigned*)to);
        for (u64 at = 4 * threadIdx.x; at < tokens * dim; at += 4 * blockDim.x) {
            unsigned word = 0;
            for (u64 i = 0; i < 4; i++) {
                u64 token = (at + i) / dim, column = (at + i) % dim;
                float value = from_bf16(((const u16*)(from + token * token_stride))[column]);
                word |= (unsigned)packed(value, scale, is_fp8) << (8 * i);
            }
            *(unsigned*)(to + 16 + at) = word;
        }
    }
}

// The way back.
extern "C" __global__ void restore_pieces(u64 packs, u64 rows, u64 count, u64 tokens, u64 dim,
                                          u64 token_stride, u64 is_fp8) {
    for (u64 piece = blockIdx.x; piece < count; piece += gridDim.x) {
        const u8* from = (const u8*)((const u64*)packs)[piece];
        u8* to = (u8*)((const u64*)rows)[piece];
        float scale = __uint_as_float(*(const unsigned*)from);
        for (u64 at = 4 * threadIdx.x; at < tokens * dim; at += 4 * blockDim.x) {
            unsigned word = *(const unsigned*)(from + 16 + at);
            for (u64 i = 0; i < 4; i++) {
                u8 byte = (u8)(word >> (8 * i));
                float q = is_fp8 ? from_e4m3(byte) : (float)(signed char)byte;
                u64 token = (at + i) / dim, column = (at + i) % dim;
                ((u16*)(to + token * token_stride))[column] = to_bf16(__fmul_rn(q, scale));
            }
        }
    }
}
