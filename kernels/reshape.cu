// Scatter and gather between extents in staging and paged KV, with the CRC-32 of the bytes.
//
// A plane's bytes in staging are cut into tiles, and a CTA takes tiles in turn. Within a tile, a
// thread takes the 16-byte groups at 16 * (thread + 256 * step): neighbouring threads are
// neighbours in staging, and the paged side gets whole heads at a time. Every byte is moved by
// exactly one thread, so nothing is atomic.
//
// The CRC of a tile is raw: M(x) * x^32 mod P, with the bytes up to the next multiple of
// FOREBAY_STEP_BYTES as zeros. The host takes those zeros away and puts tiles and planes together
// (src/device/cuda/crc.rs).

#define FOREBAY_GROUP_BYTES 16u
#define FOREBAY_STEP_BYTES (FOREBAY_THREADS * FOREBAY_GROUP_BYTES)
#define FOREBAY_TILE_BYTES 65536u

// CRC-32 as gzip and NVMe tools compute it, reflected: bit 31 of a word stands for x^0.
#define FOREBAY_POLYNOMIAL 0xedb88320u
// x^(8 * FOREBAY_STEP_BYTES) mod P: from one group of a thread to its next.
#define FOREBAY_X_STEP 0x09fe548fu
// x^32 mod P.
#define FOREBAY_X_32 0xedb88320u

// One plane of one layer of one chunk. Mirrored by src/device/cuda/plane.rs.
struct Plane {
    u64 staging;       // address of the plane's first byte in staging
    u64 paged;         // address of block 0, token 0, head 0 in the paged KV
    u64 slots;         // address of its slot table: one i64 per token
    u64 block_stride;  // bytes
    u64 token_stride;  // bytes
    u64 head_stride;   // bytes
    u64 bytes;         // of the plane in staging, at most 2^30
    u32 first_tile;    // ascending from plane to plane, without gaps
    u32 elem_bytes;    // 16, 4 or 1; divides all addresses, strides and lengths of the plane
    u32 heads;
    u32 head_elems;    // elements of one head
    u32 heads_mul, heads_shift;  // to divide by `heads`
    u32 elems_mul, elems_shift;  // to divide by `head_elems`
};
static_assert(sizeof(Plane) == 88, "mirrored in plane.rs");

// Sixteen bytes of an extent. Also the four words of a CRC's state, one for each word of a thread's
// groups.
typedef uint4 Group;

// The shared memory of the CRC.
struct CrcTables {
    u32 step[4][256];  // byte `k` of a word times x^(8 * FOREBAY_STEP_BYTES)
    u32 partial[FOREBAY_THREADS];
    u32 folded[16];
};

// a * x mod P.
__device__ __forceinline__ u32 crc_times_x(u32 a) { return (a >> 1) ^ (FOREBAY_POLYNOMIAL & (0u - (a & 1u))); }

// a * b mod P.
__device__ __forceinline__ u32 crc_times(u32 a, u32 b) {
    u32 product = 0;
#pragma unroll 8
    for (u32 bit = 0; bit < 32; ++bit) {
        product ^= b & (0u - (a >> 31));
        a <<= 1;
        b = crc_times_x(b);
    }
    return product;
}

// a * x^32 mod P.
__device__ __forceinline__ u32 crc_times_x32(u32 a) {
#pragma unroll 8
    for (u32 bit = 0; bit < 32; ++bit) a = crc_times_x(a);
    return a;
}

// Fills the tables; each thread one entry of each.
__device__ __forceinline__ void crc_tables(CrcTables& shared) {
    u32 entry[4] = {0, 0, 0, 0};
    u32 power = FOREBAY_X_STEP;
#pragma unroll
    for (int bit = 31; bit >= 0; --bit) {
        entry[bit / 8] ^= power & (0u - ((threadIdx.x >> (bit % 8)) & 1u));
        power = crc_times_x(power);
    }
    for (u32 k = 0; k < 4; ++k) shared.step[k][threadIdx.x] = entry[k];
    __syncthreads();
}

// x^(128 << i) mod P: the factor of a CRC for 2^i groups that follow it.
__constant__ u32 CRC_GROUPS[8] = {0xa06a2517u, 0xed627daeu, 0x88d14467u, 0xd7bbfe6au,
                                  0xec447f11u, 0x8e7ea170u, 0x6427800eu, 0x4d47bae0u};

// The factor of a thread's state in the tile's CRC: x^(128 * threads after it) * x^32.
__device__ __forceinline__ u32 crc_place() {
    u32 place = FOREBAY_X_32;
    const u32 following = FOREBAY_THREADS - 1 - threadIdx.x;
#pragma unroll 1
    for (u32 i = 0; i < 8; ++i) {
        if (following >> i & 1u) place = crc_times(place, CRC_GROUPS[i]);
    }
    return place;
}

// One word of the state times x^(8 * FOREBAY_STEP_BYTES).
__device__ __forceinline__ u32 crc_advance(const CrcTables& shared, u32 a) {
    return shared.step[0][a & 255u] ^ shared.step[1][a >> 8 & 255u] ^ shared.step[2][a >> 16 & 255u] ^
           shared.step[3][a >> 24];
}

__device__ __forceinline__ void crc_take(const CrcTables& shared, Group& state, const Group& group) {
    state.x = crc_advance(shared, state.x) ^ group.x;
    state.y = crc_advance(shared, state.y) ^ group.y;
    state.z = crc_advance(shared, state.z) ^ group.z;
    state.w = crc_advance(shared, state.w) ^ group.w;
}

// The CRC of the CTA's tile, in thread 0. All threads must call it.
__device__ __forceinline__ u32 crc_fold(CrcTables& shared, const Group& state, u32 place) {
    const u32 words = crc_times_x32(crc_times_x32(crc_times_x32(state.x) ^ state.y) ^ state.z) ^ state.w;
    shared.partial[threadIdx.x] = crc_times(words, place);
    __syncthreads();
    u32 sum = 0;
    if (threadIdx.x < 16) {
        for (u32 i = 0; i < 16; ++i) sum ^= shared.partial[threadIdx.x + 16 * i];
        shared.folded[threadIdx.x] = sum;
    }
    // No thread writes `partial` again before all have passed here, nor `folded` before the next
    // barrier.
    __syncthreads();
    sum = 0;
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < 16; ++i) sum ^= shared.folded[i];
    }
    return sum;
}

// Where an element of a plane lies in the paged KV; 0 where its token is left alone.
__device__ __forceinline__ u64 paged_address(const Plane& plane, u32 element) {
    const u32 row = divide(element, plane.elems_mul, plane.elems_shift);
    const u32 token = divide(row, plane.heads_mul, plane.heads_shift);
    const i64 slot = __ldg((const i64*)plane.slots + token);
    if (slot == FOREBAY_SKIP) return 0;
    const u32 head = row - token * plane.heads;
    const u32 inside = element - row * plane.head_elems;
    return plane.paged + slot_offset(slot, plane.block_stride, plane.token_stride) + (u64)head * plane.head_stride +
           (u64)inside * plane.elem_bytes;
}

// A group that is moved in elements of 4 or 1 bytes. `left` is the number of the tile's bytes from
// the group's first on.
template <u32 ELEM, class Word>
struct Pieces {
    enum : u32 { UNROLL = 1 };
    static __device__ __forceinline__ void put(u32 (&words)[4], u32 at, Word value) {
        words[at / 4] |= (u32)value << (8 * (at % 4));
    }
    static __device__ __forceinline__ Word get(const u32 (&words)[4], u32 at) {
        return (Word)(words[at / 4] >> (8 * (at % 4)));
    }
    static __device__ __forceinline__ Group load(u64 address, i64 left) {
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 at = 0; at < FOREBAY_GROUP_BYTES; at += ELEM) {
            if (at < left) put(words, at, __ldg((const Word*)(address + at)));
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    static __device__ __forceinline__ void store(u64 address, const Group& group, i64 left) {
        const u32 words[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
        for (u32 at = 0; at < FOREBAY_GROUP_BYTES; at += ELEM) {
            if (at < left) *(Word*)(address + at) = get(words, at);
        }
    }
    static __device__ __forceinline__ u64 locate(const Plane&, u32, i64) { return 0; }
    static __device__ __forceinline__ void scatter(const Plane& plane, u32 byte, u64, const Group& group, i64 left) {
        const u32 words[4] = {group.x, group.y, group.z, group.w};
#pragma unroll
        for (u32 at = 0; at < FOREBAY_GROUP_BYTES; at += ELEM) {
            const u64 address = at < left ? paged_address(plane, (byte + at) / ELEM) : 0;
            if (address != 0) *(Word*)address = get(words, at);
        }
    }
    static __device__ __forceinline__ Group gather(const Plane& plane, u32 byte, u64, i64 left) {
        u32 words[4] = {0, 0, 0, 0};
#pragma unroll
        for (u32 at = 0; at < FOREBAY_GROUP_BYTES; at += ELEM) {
            const u64 address = at < left ? paged_address(plane, (byte + at) / ELEM) : 0;
            if (address != 0) put(words, at, __ldg((const Word*)address));
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// A group that is moved as one element. Its address is found before it is moved, so that the loads
// of several groups are in flight at once.
struct Whole {
    // Steps whose loads are in flight together.
    enum : u32 { UNROLL = 4 };
    static __device__ __forceinline__ Group load(u64 address, i64 left) {
        return left > 0 ? __ldcs((const Group*)address) : make_uint4(0, 0, 0, 0);
    }
    static __device__ __forceinline__ void store(u64 address, const Group& group, i64 left) {
        if (left > 0) __stcg((Group*)address, group);
    }
    static __device__ __forceinline__ u64 locate(const Plane& plane, u32 byte, i64 left) {
        return left > 0 ? paged_address(plane, byte / FOREBAY_GROUP_BYTES) : 0;
    }
    static __device__ __forceinline__ void scatter(const Plane&, u32, u64 address, const Group& group, i64) {
        if (address != 0) __stcg((Group*)address, group);
    }
    static __device__ __forceinline__ Group gather(const Plane&, u32, u64 address, i64) {
        return address != 0 ? __ldcs((const Group*)address) : make_uint4(0, 0, 0, 0);
    }
};

// Moves one tile: the `bytes` bytes of a plane from its byte `start` on. Returns this thread's
// state of the CRC.
template <class Mover, bool INTO_KV, bool WITH_CRC>
__device__ __forceinline__ Group move_tile(const Plane& plane, u32 start, u32 bytes, const CrcTables* shared) {
    Group state = make_uint4(0, 0, 0, 0);
    for (u32 step = 0; step < bytes; step += Mover::UNROLL * FOREBAY_STEP_BYTES) {
        Group group[Mover::UNROLL];
        u64 address[Mover::UNROLL];
#pragma unroll
        for (u32 i = 0; i < Mover::UNROLL; ++i) {
            const u32 at = step + i * FOREBAY_STEP_BYTES + threadIdx.x * FOREBAY_GROUP_BYTES;
            const i64 left = (i64)bytes - at;
            if (INTO_KV) group[i] = Mover::load(plane.staging + start + at, left);
            address[i] = Mover::locate(plane, start + at, left);
        }
#pragma unroll
        for (u32 i = 0; i < Mover::UNROLL; ++i) {
            const u32 at = step + i * FOREBAY_STEP_BYTES + threadIdx.x * FOREBAY_GROUP_BYTES;
            const i64 left = (i64)bytes - at;
            if (!INTO_KV) group[i] = Mover::gather(plane, start + at, address[i], left);
        }
#pragma unroll
        for (u32 i = 0; i < Mover::UNROLL; ++i) {
            const u32 at = step + i * FOREBAY_STEP_BYTES + threadIdx.x * FOREBAY_GROUP_BYTES;
            const i64 left = (i64)bytes - at;
            if (INTO_KV) Mover::scatter(plane, start + at, address[i], group[i], left);
            if (!INTO_KV) Mover::store(plane.staging + start + at, group[i], left);
            // A step beyond the tile is not in the CRC. All threads decide alike.
            if (WITH_CRC && step + i * FOREBAY_STEP_BYTES < bytes) crc_take(*shared, state, group[i]);
        }
    }
    return state;
}

template <bool INTO_KV, bool WITH_CRC>
__device__ __forceinline__ void reshape(const Plane* planes, u32 num_planes, u32 num_tiles, u32* tile_crcs,
                                        CrcTables* shared) {
    if (blockIdx.x >= num_tiles) return;
    u32 place = 0;
    if (WITH_CRC) {
        crc_tables(*shared);
        place = crc_place();
    }
    for (u64 tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const Plane plane = planes[find_owner(planes, num_planes, (u32)tile)];
        const u32 start = ((u32)tile - plane.first_tile) * FOREBAY_TILE_BYTES;
        const u64 rest = plane.bytes - start;
        const u32 bytes = rest < FOREBAY_TILE_BYTES ? (u32)rest : FOREBAY_TILE_BYTES;
        Group state;
        if (plane.elem_bytes == 16) {
            state = move_tile<Whole, INTO_KV, WITH_CRC>(plane, start, bytes, shared);
        } else if (plane.elem_bytes == 4) {
            state = move_tile<Pieces<4, u32>, INTO_KV, WITH_CRC>(plane, start, bytes, shared);
        } else {
            state = move_tile<Pieces<1, u8>, INTO_KV, WITH_CRC>(plane, start, bytes, shared);
        }
        if (WITH_CRC) {
            const u32 crc = crc_fold(*shared, state, place);
            if (threadIdx.x == 0) tile_crcs[tile] = crc;
        }
    }
}

extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_scatter(const Plane* planes, u32 num_planes, u32 num_tiles, u32*) {
    reshape<true, false>(planes, num_planes, num_tiles, nullptr, nullptr);
}

extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_scatter_crc(const Plane* planes, u32 num_planes, u32 num_tiles, u32* tile_crcs) {
    __shared__ CrcTables shared;
    reshape<true, true>(planes, num_planes, num_tiles, tile_crcs, &shared);
}

extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_gather(const Plane* planes, u32 num_planes, u32 num_tiles, u32*) {
    reshape<false, false>(planes, num_planes, num_tiles, nullptr, nullptr);
}

extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_gather_crc(const Plane* planes, u32 num_planes, u32 num_tiles, u32* tile_crcs) {
    __shared__ CrcTables shared;
    reshape<false, true>(planes, num_planes, num_tiles, tile_crcs, &shared);
}

// Copies descriptors from pinned host memory to the GPU's, in groups. A copy by the driver would
// wait behind the large ones that bring KV.
extern "C" __global__ void __launch_bounds__(FOREBAY_THREADS, 4)
    forebay_upload(const Group* from, u32 groups, u32, u32* to) {
    for (u32 i = blockIdx.x * FOREBAY_THREADS + threadIdx.x; i < groups; i += gridDim.x * FOREBAY_THREADS) {
        ((Group*)to)[i] = from[i];
    }
}
