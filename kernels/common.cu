// Definitions for all kernels. No file includes another: NVRTC, and a plain C++ compiler with a
// shim, compile them one after another as one unit (kernels/README.md).
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Threads of a CTA; every launch must have exactly these.
#define FOREBAY_THREADS 256u

// Entry of a slot table for a token that has no slot.
#define FOREBAY_SKIP (-1ll)

// n / d for n below 2^31, with `mul` and `shift` made by the host for d.
__device__ __forceinline__ u32 divide(u32 n, u32 mul, u32 shift) { return (u32)(((u64)n * mul) >> shift); }

// Offset of a slot's token in a plane of paged KV. A slot is `block << 32 | token in the block`.
__device__ __forceinline__ u64 slot_offset(i64 slot, u64 block_stride, u64 token_stride) {
    return ((u64)slot >> 32) * block_stride + (u64)(u32)slot * token_stride;
}

// The descriptor that a tile belongs to: the last that starts at or before it.
template <class Descriptor>
__device__ __forceinline__ u32 find_owner(const Descriptor* descriptors, u32 count, u32 tile) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        const u32 middle = low + (high - low) / 2;
        if (descriptors[middle].first_tile <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
