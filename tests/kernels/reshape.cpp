// The kernels under AddressSanitizer, against plain loops over bytes: random geometries in allocations that end where the
// layout's reach ends. usage: reshape [seed] [cases]
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "exp4.h"
#include "rope.h"
#include "support.h"

namespace {

// A plane in the server's memory: any order of the dimensions, with gaps.
struct Geometry {
    u32 heads, head_bytes, block_tokens, blocks;
    u64 block_stride, token_stride, head_stride;
    u64 reach;  // bytes from the first element to the end of the last
};

Geometry random_geometry(Random& random, u32 align, bool opaque) {
    Geometry g{};
    g.heads = opaque ? 1 : random.of({1u, 1u, 2u, 3u, 5u, 8u});
    g.block_tokens = opaque ? 1 : random.between(1, 33);
    g.blocks = random.between(1, 12);
    g.head_bytes = align * (opaque ? random.between(1, 70000 / align) : random.between(1, 256 / align));
    // Lengths at which steps and tiles end.
    if (opaque && random.one_in(2)) g.head_bytes = random.of({4096u, 8192u, 20480u, 65536u, 69632u});
    struct Dim {
        u32 count;
        u64* stride;
    } dims[3] = {{g.heads, &g.head_stride}, {g.block_tokens, &g.token_stride}, {g.blocks, &g.block_stride}};
    for (u32 i = 2; i > 0; --i) std::swap(dims[i], dims[random.between(0, i)]);
    u64 span = g.head_bytes;
    g.reach = span;
    for (const Dim& dim : dims) {
        *dim.stride = span + (random.one_in(3) ? align * random.between(1, 5) : 0);
        span = *dim.stride * dim.count;
        g.reach += *dim.stride * (dim.count - 1);
    }
    return g;
}

// One plane of one chunk, and what the test must know of it beside its descriptor.
struct Piece {
    Geometry geometry;
    u32 tokens, memory;
    std::size_t staging_at;
    std::vector<i64> slots;
};

u64 paged_offset(const Piece& piece, u32 token, u32 head) {
    const u64 slot = (u64)piece.slots[token];
    return (slot >> 32) * piece.geometry.block_stride + (slot & 0xffffffffu) * piece.geometry.token_stride +
           head * piece.geometry.head_stride;
}

u32 elem_bytes(const Plane& plane, u32 head_bytes) {
    const u64 all =
        plane.staging | plane.paged | plane.block_stride | plane.token_stride | plane.head_stride | head_bytes;
    return all % 16 == 0 ? 16 : all % 4 == 0 ? 4 : 1;
}

struct Case {
    std::vector<Piece> pieces;
    std::vector<Memory> paged;     // one per layer
    std::unique_ptr<Memory> staging;
    std::vector<Memory> tables;
    std::vector<Plane> planes;
    u32 tiles = 0;

    explicit Case(Random& random) {
        const u32 layers = random.between(1, 3), chunks = random.between(1, 3);
        std::size_t staging_bytes = 0;
        std::vector<Geometry> geometries;
        const u32 align = random.of({1u, 4u, 16u, 16u});
        for (u32 layer = 0; layer < layers; ++layer) {
            geometries.push_back(random_geometry(random, align, random.one_in(5)));
            paged.emplace_back(geometries.back().reach, random.one_in(4) ? align % 16 : 0);
            paged.back().fill(random);
            // The slots of a layer, dealt to its chunks.
            const Geometry& g = geometries.back();
            std::vector<i64> slots;
            for (u32 block = 0; block < g.blocks; ++block)
                for (u32 token = 0; token < g.block_tokens; ++token) slots.push_back((i64)((u64)block << 32 | token));
            if (random.one_in(2))
                for (std::size_t i = slots.size(); i > 1; --i) std::swap(slots[i - 1], slots[random.between(0, (u32)i - 1)]);
            std::size_t dealt = 0;
            for (u32 chunk = 0; chunk < chunks; ++chunk) {
                const u32 left = (u32)(slots.size() - dealt);
                Piece piece{g, 0, layer, staging_bytes, {}};
                const u32 take = chunk + 1 == chunks ? left : random.between(0, left);
                piece.slots.assign(slots.begin() + dealt, slots.begin() + dealt + take);
                dealt += take;
                const u32 holes = random.of({0u, 0u, 3u, 20u});
                for (u32 h = 0; h < holes; ++h) piece.slots.insert(piece.slots.begin() + random.between(0, (u32)piece.slots.size()), -1);
                piece.tokens = (u32)piece.slots.size();
                if (piece.tokens == 0) continue;
                staging_bytes += (std::size_t)piece.tokens * g.heads * g.head_bytes;
                pieces.push_back(piece);
            }
        }
        const std::size_t shift = random.one_in(4) ? align % 16 : 0;
        staging = std::make_unique<Memory>(staging_bytes, shift);
        staging->fill(random);
        for (const Piece& piece : pieces) add_plane(piece);
    }

    void add_plane(const Piece& piece) {
        tables.push_back(memory_of(piece.slots));
        const Geometry& g = piece.geometry;
        Plane plane{};
        plane.staging = staging->address() + piece.staging_at;
        plane.paged = paged[piece.memory].address();
        plane.slots = tables.back().address();
        plane.block_stride = g.block_stride;
        plane.token_stride = g.token_stride;
        plane.head_stride = g.head_stride;
        plane.bytes = (u64)piece.tokens * g.heads * g.head_bytes;
        plane.first_tile = tiles;
        plane.elem_bytes = elem_bytes(plane, g.head_bytes);
        plane.heads = g.heads;
        plane.head_elems = g.head_bytes / plane.elem_bytes;
        make_divisor(plane.heads, plane.heads_mul, plane.heads_shift);
        make_divisor(plane.head_elems, plane.elems_mul, plane.elems_shift);
        tiles += (u32)((plane.bytes + 65535) / 65536);
        planes.push_back(plane);
    }

    // Visits every (offset in staging, offset in the layer's memory or -1, bytes) of a piece.
    template <class Visit>
    void rows(const Piece& piece, Visit visit) const {
        const Geometry& g = piece.geometry;
        std::size_t at = piece.staging_at;
        for (u32 token = 0; token < piece.tokens; ++token)
            for (u32 head = 0; head < g.heads; ++head, at += g.head_bytes)
                visit(at, piece.slots[token] == -1 ? -1 : (i64)paged_offset(piece, token, head), g.head_bytes);
    }
};

void test_case(Random& random, Launcher& launcher, bool into_kv, bool with_crc) {
    Case c(random);
    if (c.planes.empty()) return;
    std::vector<u8> staging = c.staging->copy();
    std::vector<std::vector<u8>> paged;
    for (const Memory& memory : c.paged) paged.push_back(memory.copy());
    for (const Piece& piece : c.pieces) {
        c.rows(piece, [&](std::size_t at, i64 place, u32 bytes) {
            u8* row = staging.data() + at;
            u8* key = place < 0 ? nullptr : paged[piece.memory].data() + place;
            if (into_kv && key) std::memcpy(key, row, bytes);
            if (!into_kv && key) std::memcpy(row, key, bytes);
            if (!into_kv && !key) std::memset(row, 0, bytes);
        });
    }
    Memory planes = memory_of(c.planes), crcs(c.tiles * sizeof(u32));
    std::memset(crcs.data(), 0xee, crcs.size());
    const u32 ctas = random.of({1u, 2u, 3u, 7u, c.tiles, c.tiles + 1, c.tiles + 20});
    const char* name = into_kv ? (with_crc ? "forebay_scatter_crc" : "forebay_scatter")
                               : (with_crc ? "forebay_gather_crc" : "forebay_gather");
    launcher.what += std::string(", ") + name + " by " + std::to_string(ctas) + " CTAs, " +
                     std::to_string(c.planes.size()) + " planes, " + std::to_string(c.tiles) + " tiles";
    u32* tile_crcs = reinterpret_cast<u32*>(crcs.data());
    launcher.run(name, ctas, planes.data(), (u32)c.planes.size(), c.tiles, with_crc ? tile_crcs : nullptr);
    launcher.check(c.staging->copy() == staging, "staging differs");
    for (std::size_t i = 0; i < paged.size(); ++i)
        launcher.check(c.paged[i].copy() == paged[i], "memory " + std::to_string(i) + " of the paged KV differs");
    for (std::size_t p = 0; with_crc && p < c.planes.size(); ++p) {
        const Plane& plane = c.planes[p];
        for (u64 at = 0; at < plane.bytes; at += 65536) {
            const u32 tile = plane.first_tile + (u32)(at / 65536);
            const u32 expected = raw_crc((const u8*)plane.staging + at, std::min<u64>(65536, plane.bytes - at));
            launcher.check(tile_crcs[tile] == expected, "the CRC of tile " + std::to_string(tile));
        }
    }
}

// Blocks, tokens and heads that lie more than 4 GiB apart, in memory of which only what is touched exists.
void test_far(Launcher& launcher) {
    const u64 far = (5ull << 30) + 4096;
    for (u32 dim = 0; dim < 3; ++dim) {
        for (u32 elem : {16u, 4u, 1u}) {
            launcher.what = "far apart in dimension " + std::to_string(dim) + ", elements of " + std::to_string(elem);
            const u64 strides[3] = {dim == 0 ? far : 256, dim == 1 ? far : 128, dim == 2 ? far : 64};
            void* mapping = mmap(nullptr, 2 * far, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            launcher.check(mapping != MAP_FAILED, "no address space");
            u8* paged = static_cast<u8*>(mapping);
            std::vector<i64> slots;
            for (u64 token = 0; token < 4; ++token) slots.push_back((i64)((token / 2) << 32 | token % 2));
            Memory table = memory_of(slots), staging(4 * 2 * 64);
            Random random(dim);
            staging.fill(random);
            Plane plane{};
            plane.staging = staging.address();
            plane.paged = reinterpret_cast<u64>(paged);
            plane.slots = table.address();
            plane.block_stride = strides[0];
            plane.token_stride = strides[1];
            plane.head_stride = strides[2];
            plane.bytes = staging.size();
            plane.elem_bytes = elem;
            plane.heads = 2;
            plane.head_elems = 64 / elem;
            make_divisor(2, plane.heads_mul, plane.heads_shift);
            make_divisor(plane.head_elems, plane.elems_mul, plane.elems_shift);
            launcher.run("forebay_scatter", 1, &plane, 1, 1, nullptr);
            for (u32 row = 0; row < 8; ++row) {
                const u64 place = row / 4 * strides[0] + row / 2 % 2 * strides[1] + row % 2 * strides[2];
                launcher.check(std::memcmp(paged + place, staging.data() + row * 64, 64) == 0, "row " + std::to_string(row));
            }
            munmap(mapping, 2 * far);
        }
    }
}

extern "C" void disagree(const Plane*, u32, u32, u32*) {
    if (threadIdx.x != 7) __syncthreads();
}

// What the shim itself must refuse.
void test_shim(Launcher& launcher) {
    void* none[4] = {};
    const unsigned one[3] = {1, 1, 1}, block[3] = {256, 1, 1}, wide[3] = {128, 1, 1}, no[3] = {0, 1, 1};
    const void* nothing = nullptr;
    u32 zero = 0;
    void* args[4] = {&nothing, &zero, &zero, &nothing};
    launcher.check(forebay_shim_launch("forebay_scatters", one, block, none) == 1, "an unknown name");
    launcher.check(forebay_shim_launch("forebay_scatter", one, wide, args) == 3, "a CTA of 128 threads");
    launcher.check(forebay_shim_launch("forebay_scatter", no, block, args) == 3, "a grid of no CTAs");
    launcher.check(forebay_shim_launch("forebay_scatter_crc", one, block, args) == 0, "a launch of no tiles");
    launcher.check(run<Plane, disagree>({1, 1, 1}, {256, 1, 1}, args) == 2, "a barrier that one thread does not reach");
}

// Descriptors arrive as they are, and nothing beside them.
void test_upload(Random& random, Launcher& launcher) {
    const u32 groups = random.of({1u, 2u, 255u, 256u, 257u, 1000u, random.between(1, 5000)});
    Memory from(groups * 16), to(groups * 16);
    from.fill(random);
    to.fill(random);
    launcher.run("forebay_upload", random.of({1u, 2u, 7u, 40u}), from.data(), groups, (groups + 255) / 256, (u32*)to.data());
    launcher.check(to.copy() == from.copy(), "descriptors of " + std::to_string(groups) + " groups");
}

void test_all(u64 seed, u64 cases, bool chatty) {
    for (u64 i = seed; i < seed + cases; ++i) {
        Random random(i);
        Launcher launcher{"seed " + std::to_string(i)};
        test_case(random, launcher, i & 1, i & 2);
        launcher.what = "seed " + std::to_string(i) + ", rope";
        test_rope(random, launcher);
        launcher.what = "seed " + std::to_string(i) + ", exp4";
        test_exp4(random, launcher);
        launcher.what = "seed " + std::to_string(i) + ", upload";
        test_upload(random, launcher);
    }
    if (chatty) std::printf("%llu cases from seed %llu on\n", (unsigned long long)cases, (unsigned long long)seed);
}

}  // namespace

int main(int argc, char** argv) {
    const u64 seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
    const u64 cases = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 200;
    Launcher launcher{"the shim"};
    test_shim(launcher);
    test_far(launcher);
    test_all(seed, cases, true);
    // Streams launch at the same time.
    std::vector<std::thread> threads;
    for (u64 i = 0; i < 3; ++i) threads.emplace_back([=] { test_all(seed + 100000 * (i + 1), 4, false); });
    for (std::thread& thread : threads) thread.join();
    return 0;
}
