// Copies `count` pieces: lengths[i] bytes from sources[i] to destinations[i], host or device memory
// alike. A group of threads takes piece after piece, several groups a thread block: reads over the
// bus take a microsecond or two, so that many must be under way. Addresses and lengths may be odd.
// Where source and destination are misaligned alike, the middle goes in 16-byte words, otherwise
// byte by byte. The tables are read when the kernel runs: they belong to it until then.

typedef unsigned long long u64;
typedef unsigned char u8;

#define GROUP 64u

struct Lane { u64 at, width; };

static __device__ __forceinline__ void copy_bytes(u8* to, const u8* from, u64 length, Lane lane) {
    for (u64 i = lane.at; i < length; i += lane.width) __stcs(to + i, __ldcs(from + i));
}

static __device__ __forceinline__ void copy_words(uint4* to, const uint4* from, u64 words,
                                                  Lane lane) {
    u64 i = lane.at;
    const u64 step = lane.width;
    // Four loads in flight a thread.
    for (; i + 3 * step < words; i += 4 * step) {
        uint4 a = __ldcs(from + i);
        uint4 b = __ldcs(from + i + step);
        uint4 c = __ldcs(from + i + 2 * step);
        uint4 d = __ldcs(from + i + 3 * step);
        __stcs(to + i, a);
        __stcs(to + i + step, b);
        __stcs(to + i + 2 * step, c);
        __stcs(to + i + 3 * step, d);
    }
    for (; i < words; i += step) __stcs(to + i, __ldcs(from + i));
}

extern "C" __global__ void __launch_bounds__(1024, 1) copy_pieces(
    u64 destinations, u64 sources, u64 lengths, u64 count) {
    const unsigned width = blockDim.x < GROUP ? blockDim.x : GROUP;
    const unsigned groups = blockDim.x / width;
    const Lane lane = {threadIdx.x % width, width};
    for (u64 piece = blockIdx.x * (u64)groups + threadIdx.x / width; piece < count;
         piece += gridDim.x * (u64)groups) {
        u8* to = (u8*)((const u64*)destinations)[piece];
        const u8* from = (const u8*)((const u64*)sources)[piece];
        u64 length = ((const u64*)lengths)[piece];
        if (((u64)to ^ (u64)from) & 15) {
            copy_bytes(to, from, length, lane);
            continue;
        }
        u64 head = (16 - ((u64)to & 15)) & 15;
        if (head > length) head = length;
        copy_bytes(to, from, head, lane);
        u64 words = (length - head) / 16;
        copy_words((uint4*)(to + head), (const uint4*)(from + head), words, lane);
        u64 done = head + words * 16;
        copy_bytes(to + done, from + done, length - done, lane);
    }
}
