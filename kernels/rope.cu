// Rotary re-rotation: turns keys in paged KV, each rotated for its old position, in place to a new
// one.
//
// The angle between two positions comes from the server's own table: with (c, s) of the old and
// (c', s') of the new position, the turn is (c c' + s s', c s' - s c') / (c^2 + s^2). A scale in
// the table cancels, so keys keep theirs. Every pair belongs to one thread. The arithmetic is that
// of src/device/rope.rs, bit for bit.

// Pairs of a tile.
#define FOREBAY_ROPE_TILE 4096u

// Element types.
#define FOREBAY_F32 0u
#define FOREBAY_BF16 1u
#define FOREBAY_F16 2u

// The keys of one plane for the tokens of one plan. Mirrored by src/device/cuda/rope.rs.
struct Rope {
    u64 paged;          // address of block 0, token 0, head 0
    u64 slots;          // address of the slot table: one i64 per token
    u64 old_positions;  // address of one i64 per token
    u64 new_positions;
    u64 cos_sin;        // address of the table: per position `half` cosines, then `half` sines
    u64 block_stride;   // bytes
    u64 token_stride;   // bytes
    u64 head_stride;    // bytes
    u32 first_tile;
    u32 pairs;          // of all tokens and heads, below 2^31
    u32 heads;
    u32 half;           // pairs of one head; what lies beyond them in a head is left alone
    u32 interleaved;    // a pair is two neighbours (GPT-J), not an element of either half (NeoX)
    u32 key_type;
    u32 table_type;
    u32 unused;
    u32 heads_mul, heads_shift;
    u32 half_mul, half_shift;
};
static_assert(sizeof(Rope) == 112, "mirrored in rope.rs");

__device__ __forceinline__ float f16_to_f32(u32 half) {
    const u32 sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31u, mantissa = half & 0x3ffu;
    if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | mantissa << 13);
    // Subnormals are whole multiples of 2^-24, which a float holds exactly.
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)mantissa * 5.9604644775390625e-8f));
    return __uint_as_float(sign | (exponent + 112) << 23 | mantissa << 13);
}

// To the nearest, ties to even.
__device__ __forceinline__ u32 f32_to_f16(float value) {
    const u32 bits = __float_as_uint(value), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return sign | 0x7e00u | (size >> 13 & 0x3ffu);
    // From 65520 on (half way between the largest f16 and the next step) it is infinity.
    if (size >= 0x477ff000u) return sign | 0x7c00u;
    // Below 2^-14: in units of 2^-24; up to half of a unit becomes zero.
    if (size < 0x38800000u) {
        if (size <= 0x33000000u) return sign;
        const u32 shift = 126 - (size >> 23), mantissa = (size & 0x7fffffu) | 0x800000u;
        const u32 units = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), tie = 1u << (shift - 1);
        return sign | (units + (rest > tie || (rest == tie && (units & 1u)) ? 1u : 0u));
    }
    return sign | (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
}

// To the nearest, ties to even.
__device__ __forceinline__ u32 f32_to_bf16(float value) {
    const u32 bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bits >> 16 | 0x40u;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

__device__ __forceinline__ float load_float(u64 base, u64 index, u32 type) {
    if (type == FOREBAY_F32) return *(const float*)(base + 4 * index);
    const u32 bits = *(const u16*)(base + 2 * index);
    return type == FOREBAY_BF16 ? __uint_as_float(bits << 16) : f16_to_f32(bits);
}

__device__ __forceinline__ void store_float(u64 base, u64 index, u32 type, float value) {
    if (type == FOREBAY_F32) {
        *(float*)(base + 4 * index) = value;
    } else {
        *(u16*)(base + 2 * index) = (u16)(type == FOREBAY_BF16 ? f32_to_bf16(value) : f32_to_f16(value));
    }
}

__device__ __forceinline__ void turn_pair(const Rope& rope, u32 pair) {
    const u32 row = divide(pair, rope.half_mul, rope.half_shift), i = pair - row * rope.half;
    const u32 token = divide(row, rope.heads_mul, rope.heads_shift), head = row - token * rope.heads;
    const i64 slot = __ldg((const i64*)rope.slots + token);
    if (slot == FOREBAY_SKIP) return;
    const i64 from = __ldg((const i64*)rope.old_positions + token), to = __ldg((const i64*)rope.new_positions + token);
    if (from == to) return;
    const u64 old_row = (u64)from * 2 * rope.half, new_row = (u64)to * 2 * rope.half;
    const float c0 = load_float(rope.cos_sin, old_row + i, rope.table_type);
    const float s0 = load_float(rope.cos_sin, old_row + rope.half + i, rope.table_type);
    const float c1 = load_float(rope.cos_sin, new_row + i, rope.table_type);
    const float s1 = load_float(rope.cos_sin, new_row + rope.half + i, rope.table_type);
    const float norm = c0 * c0 + s0 * s0;
    const float cosine = (c0 * c1 + s0 * s1) / norm;
    const float sine = (c0 * s1 - s0 * c1) / norm;
    const u64 key = rope.paged + slot_offset(slot, rope.block_stride, rope.token_stride) + (u64)head * rope.head_stride;
    const u32 first = rope.interleaved ? 2 * i : i, second = rope.interleaved ? 2 * i + 1 : rope.half + i;
    const float x = load_float(key, first, rope.key_type), y = load_float(key, second, rope.key_type);
    store_float(key, first, rope.key_type, x * cosine - y * sine);
    store_float(key, second, rope.key_type, y * cosine + x * sine);
}

extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS)
    forebay_rope_shift(const Rope* ropes, u32 num_ropes, u32 num_tiles, u32*) {
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const Rope rope = ropes[find_owner(ropes, num_ropes, (u32)tile)];
        const u32 start = ((u32)tile - rope.first_tile) * FOREBAY_ROPE_TILE;
        for (u32 i = threadIdx.x; i < FOREBAY_ROPE_TILE && start + i < rope.pairs; i += FOREBAY_THREADS) {
            turn_pair(rope, start + i);
        }
    }
}
