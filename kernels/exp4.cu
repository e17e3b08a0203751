// The codec exp4 (docs/format.md, "Coded extents"): between a coded extent in staging and its
// values one after another in scratch memory.
//
// The kernels of reshape.cu move values to and from paged KV and take the CRC of coded bytes, so
// nothing here knows layouts. Encoding gives the bytes that src/device/host/exp4 gives. Decoding
// gives its values for bytes that an encoder wrote; for damaged bytes some values may differ.

#define EXP4_BLOCK_VALUES 128u
#define EXP4_BLOCK_CODES 64u
#define EXP4_BLOCK_BYTES (EXP4_BLOCK_CODES + EXP4_BLOCK_VALUES)
#define EXP4_SEGMENT_BLOCKS 128u
#define EXP4_SEGMENT_VALUES (EXP4_SEGMENT_BLOCKS * EXP4_BLOCK_VALUES)
#define EXP4_ENTRIES 16u
// Bytes of a segment in the tail: its dictionary and the number of escapes up to its end.
#define EXP4_SEGMENT_TAIL 20u
#define EXP4_ESCAPE_BYTES 3u
// Values that a thread takes at once, 16 bytes of them.
#define EXP4_GROUP 8u
#define EXP4_GROUPS (EXP4_SEGMENT_VALUES / EXP4_GROUP)
// A likely dictionary is made from one value in so many.
#define EXP4_SAMPLE_STEP 13u
// A segment with more escapes than this is coded again with the best dictionary.
#define EXP4_MOST_LIKELY_ESCAPES 32u
#define EXP4_NO_CODE 255u

// One extent. Mirrored by src/device/cuda/coded.rs.
struct Coded {
    u64 coded;       // address of the coded extent, a multiple of 16
    u64 raw;         // address of its values, a multiple of 16; there is room for whole blocks
    u32 values;
    u32 bytes;       // of the coded extent
    u32 first_tile;  // ascending from extent to extent, without gaps
    u32 unused;
};
static_assert(sizeof(Coded) == 32, "mirrored in coded.rs");

__device__ __forceinline__ u32 exp4_blocks(const Coded& extent) {
    return (extent.values + EXP4_BLOCK_VALUES - 1) / EXP4_BLOCK_VALUES;
}

__device__ __forceinline__ u32 exp4_segments(const Coded& extent) {
    return (exp4_blocks(extent) + EXP4_SEGMENT_BLOCKS - 1) / EXP4_SEGMENT_BLOCKS;
}

// Where the tail of a coded extent begins, and its list of escapes.
__device__ __forceinline__ u64 exp4_tail(const Coded& extent) {
    return extent.coded + (u64)exp4_blocks(extent) * EXP4_BLOCK_BYTES;
}

__device__ __forceinline__ u64 exp4_list(const Coded& extent) {
    return exp4_tail(extent) + (u64)exp4_segments(extent) * EXP4_SEGMENT_TAIL;
}

// Escapes for which there is room.
__device__ __forceinline__ u32 exp4_room(const Coded& extent) {
    return (u32)(extent.coded + extent.bytes - exp4_list(extent)) / EXP4_ESCAPE_BYTES;
}

// Blocks of a segment.
__device__ __forceinline__ u32 exp4_blocks_of(const Coded& extent, u32 segment) {
    const u32 left = exp4_blocks(extent) - segment * EXP4_SEGMENT_BLOCKS;
    return left < EXP4_SEGMENT_BLOCKS ? left : EXP4_SEGMENT_BLOCKS;
}

// The number of escapes up to the end of a segment, as far as there is room for them.
__device__ __forceinline__ u32 exp4_escapes_to(const Coded& extent, u32 segment) {
    const u32 count = *(const u32*)(exp4_tail(extent) + (u64)segment * EXP4_SEGMENT_TAIL + EXP4_ENTRIES);
    const u32 room = exp4_room(extent);
    return count < room ? count : room;
}

// Coded extents to their values; a tile is a segment. Any bytes give values, and nothing is written
// outside their memory.
extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_decode_exp4(const Coded* extents, u32 count, u32 num_tiles, u32*) {
    __shared__ u32 exponents[EXP4_ENTRIES];
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const Coded extent = extents[find_owner(extents, count, (u32)tile)];
        const u32 segment = (u32)tile - extent.first_tile, first = segment * EXP4_SEGMENT_BLOCKS;
        const u8* dictionary = (const u8*)(exp4_tail(extent) + (u64)segment * EXP4_SEGMENT_TAIL);
        if (threadIdx.x < EXP4_ENTRIES) exponents[threadIdx.x] = (u32)dictionary[threadIdx.x] << 7;
        __syncthreads();
        const u32 values = exp4_blocks_of(extent, segment) * EXP4_BLOCK_VALUES;
        for (u32 value = threadIdx.x * EXP4_GROUP; value < values; value += FOREBAY_THREADS * EXP4_GROUP) {
            const u32 at = value % EXP4_BLOCK_VALUES;
            const u64 block = extent.coded + (u64)(first + value / EXP4_BLOCK_VALUES) * EXP4_BLOCK_BYTES;
            const u64 codes = __ldcs((const u64*)(block + at % EXP4_BLOCK_CODES)) >> (at < EXP4_BLOCK_CODES ? 0 : 4);
            const u64 bytes = __ldcs((const u64*)(block + EXP4_BLOCK_CODES + at));
            u32 words[4];
#pragma unroll
            for (u32 i = 0; i < 4; ++i) {
                const u32 two = (u32)(bytes >> (16 * i)), names = (u32)(codes >> (16 * i));
                words[i] = (two & 0x80u) << 8 | (two & 0x7fu) | (two & 0x8000u) << 16 | (two & 0x7f00u) << 8 |
                           exponents[names & 15u] | exponents[names >> 8 & 15u] << 16;
            }
            const u64 to = extent.raw + 2 * ((u64)first * EXP4_BLOCK_VALUES + value);
            *(uint4*)to = make_uint4(words[0], words[1], words[2], words[3]);
        }
        __syncthreads();
        const u32 before = segment == 0 ? 0 : exp4_escapes_to(extent, segment - 1);
        const u32 end = exp4_escapes_to(extent, segment);
        for (u64 i = (u64)before + threadIdx.x; i < end; i += FOREBAY_THREADS) {
            const u8* escape = (const u8*)(exp4_list(extent) + i * EXP4_ESCAPE_BYTES);
            const u32 place = (u32)escape[0] | (u32)escape[1] << 8;
            if (place < values) {
                u16* value = (u16*)(extent.raw + 2 * ((u64)first * EXP4_BLOCK_VALUES + place));
                *value = (u16)((*value & 0x807fu) | (u32)escape[2] << 7);
            }
        }
    }
}

// The shared memory of a CTA that codes a segment.
struct Exp4Shared {
    u32 counts[256];   // how often each exponent was seen; later a number from each thread
    u32 sums[16];      // each of sixteen threads' numbers
    u32 seen, chosen;  // entries of the lists below
    u8 list[256];      // exponents that were seen, in any order
    u8 picked[EXP4_ENTRIES];  // those that have codes, in any order
    u8 codes[256];     // of exponents
    u8 dictionary[EXP4_ENTRIES];
    u8 escapes[EXP4_GROUPS];  // of each group of values
};

// The number of escapes of each segment, from the first encoding kernel to the second: behind the
// values.
__device__ __forceinline__ u32* exp4_counts(const Coded& extent) {
    return (u32*)(extent.raw + 2 * (u64)exp4_blocks(extent) * EXP4_BLOCK_VALUES);
}

// The sum of all threads' numbers; `before` is that of the threads before this one. All threads
// must call it.
__device__ __forceinline__ u32 exp4_sum(Exp4Shared& shared, u32 number, u32& before) {
    shared.counts[threadIdx.x] = number;
    __syncthreads();
    if (threadIdx.x < 16) {
        u32 sum = 0;
        for (u32 i = 0; i < 16; ++i) sum += shared.counts[threadIdx.x * 16 + i];
        shared.sums[threadIdx.x] = sum;
    }
    __syncthreads();
    u32 all = 0;
    before = 0;
    for (u32 i = 0; i < 16; ++i) {
        if (i == threadIdx.x / 16) before = all;
        all += shared.sums[i];
    }
    for (u32 i = threadIdx.x / 16 * 16; i < threadIdx.x; ++i) before += shared.counts[i];
    // No thread writes new numbers before all have added these up.
    __syncthreads();
    return all;
}

// Eight values from value `from` of the extent on; those beyond its end are zeros.
__device__ __forceinline__ uint4 exp4_load(const Coded& extent, u32 from) {
    uint4 group = make_uint4(0, 0, 0, 0);
    if (from < extent.values) group = *(const uint4*)(extent.raw + 2 * (u64)from);
    u32 words[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        if (from + 2 * i >= extent.values) words[i] = 0;
        if (from + 2 * i + 1 >= extent.values) words[i] &= 0xffffu;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Counts the exponents of every `step`th value of a segment, which begins at value `from` of the
// extent.
__device__ __forceinline__ void exp4_count(Exp4Shared& shared, const Coded& extent, u32 from, u32 values, u32 step) {
    shared.counts[threadIdx.x] = 0;
    __syncthreads();
    for (u32 at = threadIdx.x * step; at < values; at += FOREBAY_THREADS * step) {
        const u32 value = from + at < extent.values ? *(const u16*)(extent.raw + 2 * (u64)(from + at)) : 0;
        atomicAdd(&shared.counts[value >> 7 & 255u], 1u);
    }
    __syncthreads();
}

// Gives codes to the sixteen exponents that were seen most often. If fewer were seen, the next are
// those below the highest that was seen, downwards, and then those above it. Each thread decides
// about one exponent.
__device__ __forceinline__ void exp4_choose(Exp4Shared& shared) {
    const u32 exponent = threadIdx.x, mine = shared.counts[exponent];
    if (threadIdx.x == 0) shared.seen = shared.chosen = 0;
    __syncthreads();
    if (mine > 0) shared.list[atomicAdd(&shared.seen, 1u)] = (u8)exponent;
    __syncthreads();
    const u32 seen = shared.seen;
    u32 highest = 0, above = 0, ahead = 0;
#pragma unroll 1
    for (u32 i = 0; i < seen; ++i) {
        const u32 other = shared.list[i], count = shared.counts[other];
        highest = other > highest ? other : highest;
        above += other > exponent;
        ahead += count > mine || (count == mine && other < exponent);
    }
    // Ahead of an exponent that was not seen: all that were seen, and of the others those between
    // it and the highest; where it is above the highest, those below it.
    if (mine == 0) ahead = seen + (exponent < highest ? highest - exponent - above : exponent - seen);
    const bool chosen = ahead < EXP4_ENTRIES;
    if (chosen) shared.picked[atomicAdd(&shared.chosen, 1u)] = (u8)exponent;
    __syncthreads();
    u32 code = 0;
#pragma unroll
    for (u32 i = 0; i < EXP4_ENTRIES; ++i) code += shared.picked[i] < exponent;
    shared.codes[exponent] = chosen ? (u8)code : (u8)EXP4_NO_CODE;
    if (chosen) shared.dictionary[code] = (u8)exponent;
    __syncthreads();
}

// Codes of eight values in the low bits of eight bytes, and their signs and mantissas. Returns how
// many of them are escapes.
__device__ __forceinline__ u32 exp4_group(const Exp4Shared& shared, const Coded& extent, u32 from, u64& codes, u64& bytes) {
    const uint4 group = exp4_load(extent, from);
    const u32 words[4] = {group.x, group.y, group.z, group.w};
    u32 escapes = 0;
    codes = 0;
    bytes = 0;
#pragma unroll
    for (u32 i = 0; i < EXP4_GROUP; ++i) {
        const u32 value = words[i / 2] >> (16 * (i % 2)) & 0xffffu, code = shared.codes[value >> 7 & 255u];
        bytes |= (u64)((value >> 8 & 0x80u) | (value & 0x7fu)) << (8 * i);
        if (code != EXP4_NO_CODE) codes |= (u64)code << (8 * i);
        if (code == EXP4_NO_CODE && from + i < extent.values) escapes += 1;
    }
    return escapes;
}

// Writes the blocks of a segment. Returns the number of its escapes.
__device__ __forceinline__ u32 exp4_write_blocks(Exp4Shared& shared, const Coded& extent, u32 segment) {
    const u32 blocks = exp4_blocks_of(extent, segment), first = segment * EXP4_SEGMENT_BLOCKS;
    // A thread has eight values and the eight that follow 64 later: their codes share bytes.
    u32 escapes = 0;
    for (u32 i = threadIdx.x; i < blocks * 8; i += FOREBAY_THREADS) {
        const u32 block = i / 8, at = i % 8 * EXP4_GROUP, value = (first + block) * EXP4_BLOCK_VALUES + at;
        u64 low, high, low_bytes, high_bytes;
        escapes += exp4_group(shared, extent, value, low, low_bytes);
        escapes += exp4_group(shared, extent, value + EXP4_BLOCK_CODES, high, high_bytes);
        const u64 to = extent.coded + (u64)(first + block) * EXP4_BLOCK_BYTES;
        *(u64*)(to + at) = low | high << 4;
        *(u64*)(to + EXP4_BLOCK_CODES + at) = low_bytes;
        *(u64*)(to + 2 * EXP4_BLOCK_CODES + at) = high_bytes;
    }
    u32 before;
    return exp4_sum(shared, escapes, before);
}

// Writes the blocks and dictionary of each segment, and the number of its escapes; a tile is a
// segment.
extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_encode_exp4(const Coded* extents, u32 count, u32 num_tiles, u32*) {
    __shared__ Exp4Shared shared;
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const Coded extent = extents[find_owner(extents, count, (u32)tile)];
        const u32 segment = (u32)tile - extent.first_tile, from = segment * EXP4_SEGMENT_VALUES;
        const u32 values = exp4_blocks_of(extent, segment) * EXP4_BLOCK_VALUES;
        u32 escapes = 0;
#pragma unroll 1
        for (u32 step = EXP4_SAMPLE_STEP;; step = 1) {
            exp4_count(shared, extent, from, values, step);
            exp4_choose(shared);
            escapes = exp4_write_blocks(shared, extent, segment);
            if (step == 1 || escapes <= EXP4_MOST_LIKELY_ESCAPES) break;
        }
        u8* entry = (u8*)(exp4_tail(extent) + (u64)segment * EXP4_SEGMENT_TAIL);
        if (threadIdx.x < EXP4_ENTRIES) entry[threadIdx.x] = shared.dictionary[threadIdx.x];
        if (threadIdx.x == 0) exp4_counts(extent)[segment] = escapes;
        // No thread begins the next segment before all have read the dictionary.
        __syncthreads();
    }
}

// Lists the escapes of a segment that has been written, from `place` of the extent's list on.
__device__ __forceinline__ void exp4_list_escapes(Exp4Shared& shared, const Coded& extent, u32 segment, u32 place) {
    const u8* entry = (const u8*)(exp4_tail(extent) + (u64)segment * EXP4_SEGMENT_TAIL);
    shared.codes[threadIdx.x] = EXP4_NO_CODE;
    __syncthreads();
    if (threadIdx.x < EXP4_ENTRIES) shared.codes[entry[threadIdx.x]] = (u8)threadIdx.x;
    __syncthreads();
    // Neighbouring threads count neighbouring groups. Then each thread lists eight groups in a row.
    const u32 from = segment * EXP4_SEGMENT_VALUES, groups = exp4_blocks_of(extent, segment) * (EXP4_BLOCK_VALUES / EXP4_GROUP);
    for (u32 i = threadIdx.x; i < EXP4_GROUPS; i += FOREBAY_THREADS) {
        u64 codes, bytes;
        shared.escapes[i] = i < groups ? (u8)exp4_group(shared, extent, from + i * EXP4_GROUP, codes, bytes) : 0;
    }
    __syncthreads();
    u32 own = 0, before;
    for (u32 i = 0; i < 8; ++i) own += shared.escapes[threadIdx.x * 8 + i];
    exp4_sum(shared, own, before);
    if (own == 0) return;
    u8* to = (u8*)(exp4_list(extent) + (u64)(place + before) * EXP4_ESCAPE_BYTES);
#pragma unroll 1
    for (u32 i = threadIdx.x * 8 * EXP4_GROUP; i < (threadIdx.x + 1) * 8 * EXP4_GROUP; ++i) {
        if (from + i >= extent.values) return;
        const u32 exponent = *(const u16*)(extent.raw + 2 * (u64)(from + i)) >> 7 & 255u;
        if (shared.codes[exponent] != EXP4_NO_CODE) continue;
        to[0] = (u8)i;
        to[1] = (u8)(i >> 8);
        to[2] = (u8)exponent;
        to += EXP4_ESCAPE_BYTES;
    }
}

// Second half of encoding: lists the escapes of each segment behind those of the segments before
// it, whose numbers `forebay_encode_exp4` has written. A tile is a segment. `fits` is 0 for an
// extent that has more escapes than there is room for; its coded bytes mean nothing then.
extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_list_exp4(const Coded* extents, u32 count, u32 num_tiles, u32* fits) {
    __shared__ Exp4Shared shared;
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const u32 index = find_owner(extents, count, (u32)tile);
        const Coded extent = extents[index];
        const u32 segment = (u32)tile - extent.first_tile, segments = exp4_segments(extent), room = exp4_room(extent);
        const u32* counts = exp4_counts(extent);
        u32 to_here = 0, to_end = 0, unused;
        for (u32 i = threadIdx.x; i < segments; i += FOREBAY_THREADS) {
            to_end += counts[i];
            if (i < segment) to_here += counts[i];
        }
        to_here = exp4_sum(shared, to_here, unused);
        to_end = exp4_sum(shared, to_end, unused);
        const bool is_last = segment == segments - 1;
        if (is_last && threadIdx.x == 0) fits[index] = to_end <= room;
        if (to_end <= room) {
            const u32 escapes = counts[segment];
            if (escapes > 0) exp4_list_escapes(shared, extent, segment, to_here);
            if (threadIdx.x == 0) {
                *(u32*)(exp4_tail(extent) + (u64)segment * EXP4_SEGMENT_TAIL + EXP4_ENTRIES) = to_here + escapes;
            }
            const u64 rest = exp4_list(extent) + (u64)to_end * EXP4_ESCAPE_BYTES, end = extent.coded + extent.bytes;
            for (u64 to = rest + threadIdx.x; is_last && to < end; to += FOREBAY_THREADS) *(u8*)to = 0;
        }
        // No thread changes `codes` and `escapes` before all have listed this segment.
        __syncthreads();
    }
}
