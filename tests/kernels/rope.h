// Rotary shifts: the kernel against plain loops, bit for bit. Conversions of f16 are the compiler's here.
#pragma once
#include <cmath>

#include "support.h"

// Rounds to the nearest bf16 by comparing with both neighbours; not for NaN.
inline u16 nearest_bf16(float value) {
    const u16 below = (u16)(__float_as_uint(value) >> 16), above = (u16)(below + 1);
    // The step after the largest number counts as a number.
    const auto wide = [](u16 bits) {
        const double number = (double)__uint_as_float((u32)bits << 16);
        return std::isinf(number) ? std::copysign(std::ldexp(1.0, 128), number) : number;
    };
    const double low = std::fabs((double)value - wide(below)), high = std::fabs(wide(above) - (double)value);
    return low < high || (low == high && below % 2 == 0) ? below : above;
}

inline float element_at(const u8* base, u64 index, u32 type) {
    float value;
    u16 half;
    if (type == FOREBAY_F32) {
        std::memcpy(&value, base + 4 * index, 4);
        return value;
    }
    std::memcpy(&half, base + 2 * index, 2);
    if (type == FOREBAY_BF16) return __uint_as_float((u32)half << 16);
    _Float16 number;
    std::memcpy(&number, &half, 2);
    return (float)number;
}

inline void set_element(u8* base, u64 index, u32 type, float value) {
    if (type == FOREBAY_F32) {
        std::memcpy(base + 4 * index, &value, 4);
    } else if (type == FOREBAY_BF16) {
        const u16 half = nearest_bf16(value);
        std::memcpy(base + 2 * index, &half, 2);
    } else {
        const _Float16 half = (_Float16)value;
        std::memcpy(base + 2 * index, &half, 2);
    }
}

inline void test_rounding(const Launcher& launcher, float value) {
    if (std::isnan(value)) {
        launcher.check((f32_to_f16(value) & 0x7e00u) == 0x7e00u, "a NaN as an f16");
        launcher.check((f32_to_bf16(value) & 0x7fc0u) == 0x7fc0u, "a NaN as a bf16");
        return;
    }
    const _Float16 nearest = (_Float16)value;
    u16 bits;
    std::memcpy(&bits, &nearest, 2);
    launcher.check(f32_to_f16(value) == bits, "a float as an f16");
    if (std::isfinite(value)) launcher.check(f32_to_bf16(value) == nearest_bf16(value), "a float as a bf16");
}

inline void test_conversions(const Launcher& launcher) {
    for (u32 half = 0; half < 65536; ++half) {
        _Float16 number;
        const u16 bits = (u16)half;
        std::memcpy(&number, &bits, 2);
        const float expected = (float)number, got = f16_to_f32(half);
        const bool nan = std::isnan(expected);
        launcher.check(nan ? std::isnan(got) : __float_as_uint(got) == __float_as_uint(expected), "an f16 as a float");
        // The float itself, the middle between it and the next f16 (65520 after the largest), and
        // the neighbours of both.
        _Float16 next;
        const u16 next_bits = (u16)(half + 1);
        std::memcpy(&next, &next_bits, 2);
        const float middle = half % 0x8000 == 0x7bff ? std::copysign(65520.0f, expected) : (expected + (float)next) / 2;
        for (const u32 bits_near : {__float_as_uint(expected), __float_as_uint(middle)}) {
            for (const u32 step : {0u, 1u, ~0u}) test_rounding(launcher, __uint_as_float(bits_near + step));
        }
    }
}

inline void test_rope(Random& random, Launcher& launcher) {
    static thread_local bool converted = false;
    if (!converted) test_conversions(launcher);
    converted = true;
    const u32 key_type = random.between(0, 2), table_type = random.between(0, 2), key_bytes = key_type ? 2 : 4;
    const u32 half = random.of({1u, 3u, 16u, 64u}), head_elems = 2 * half + random.of({0u, 0u, 5u});
    const u32 positions = random.between(1, 40), layers = random.between(1, 2);
    const float scale = random.of({1.0f, 1.3f});
    Memory table((std::size_t)positions * 2 * half * (table_type ? 2 : 4));
    for (u32 p = 0; p < positions; ++p) {
        for (u32 i = 0; i < half; ++i) {
            const float angle = (float)p * std::pow(10000.0f, -(float)i / half);
            set_element(table.data(), (u64)p * 2 * half + i, table_type, scale * std::cos(angle));
            set_element(table.data(), (u64)p * 2 * half + half + i, table_type, scale * std::sin(angle));
        }
    }
    std::vector<Memory> keys, tables;
    std::vector<Rope> ropes;
    std::vector<std::vector<u8>> expected;
    u32 tiles = 0;
    for (u32 layer = 0; layer < layers; ++layer) {
        const u32 heads = random.between(1, 9), block_tokens = random.between(1, 33), blocks = random.between(1, 4);
        const u64 head_stride = (u64)head_elems * key_bytes, token_stride = heads * head_stride + key_bytes * random.between(0, 2);
        const u64 block_stride = block_tokens * token_stride;
        keys.emplace_back(block_stride * blocks - (token_stride - heads * head_stride));
        for (u64 i = 0; i < keys.back().size() / key_bytes; ++i)
            set_element(keys.back().data(), i, key_type, (float)random.between(0, 4000) / 500 - 4);
        std::vector<i64> slots, from, to;
        for (u32 slot = 0; slot < blocks * block_tokens; ++slot) {
            const bool skip = random.one_in(4);
            slots.push_back(skip ? -1 : (i64)((u64)(slot / block_tokens) << 32 | slot % block_tokens));
            // Tokens without a slot have positions that must not be read.
            from.push_back(skip ? 1ll << 40 : random.between(0, positions - 1));
            to.push_back(skip ? -5 : random.between(0, positions - 1));
        }
        std::vector<u8> after = keys.back().copy();
        for (std::size_t token = 0; token < slots.size(); ++token) {
            if (slots[token] == -1 || from[token] == to[token]) continue;
            const u64 place = token / block_tokens * block_stride + token % block_tokens * token_stride;
            for (u32 head = 0; head < heads; ++head) {
                u8* key = after.data() + place + head * head_stride;
                for (u32 i = 0; i < half; ++i) {
                    const auto angle = [&](i64 p, u32 at) { return element_at(table.data(), p * 2 * half + at, table_type); };
                    const float c0 = angle(from[token], i), s0 = angle(from[token], half + i);
                    const float c1 = angle(to[token], i), s1 = angle(to[token], half + i), norm = c0 * c0 + s0 * s0;
                    const float cosine = (c0 * c1 + s0 * s1) / norm, sine = (c0 * s1 - s0 * c1) / norm;
                    const u32 a = layer == 0 ? i : 2 * i, b = layer == 0 ? half + i : 2 * i + 1;
                    const float x = element_at(key, a, key_type), y = element_at(key, b, key_type);
                    set_element(key, a, key_type, x * cosine - y * sine);
                    set_element(key, b, key_type, y * cosine + x * sine);
                }
            }
        }
        expected.push_back(after);
        tables.push_back(memory_of(slots));
        tables.push_back(memory_of(from));
        tables.push_back(memory_of(to));
        const Memory* last = &tables.back();
        Rope rope{};
        rope.paged = keys.back().address();
        rope.slots = last[-2].address();
        rope.old_positions = last[-1].address();
        rope.new_positions = last[0].address();
        rope.cos_sin = table.address();
        rope.block_stride = block_stride;
        rope.token_stride = token_stride;
        rope.head_stride = head_stride;
        rope.first_tile = tiles;
        rope.pairs = (u32)slots.size() * heads * half;
        rope.heads = heads;
        rope.half = half;
        rope.interleaved = layer;
        rope.key_type = key_type;
        rope.table_type = table_type;
        make_divisor(heads, rope.heads_mul, rope.heads_shift);
        make_divisor(half, rope.half_mul, rope.half_shift);
        tiles += (rope.pairs + 4095) / 4096;
        ropes.push_back(rope);
    }
    Memory descriptors = memory_of(ropes);
    const u32 ctas = random.of({1u, 2u, tiles, tiles + 3});
    launcher.run("forebay_rope_shift", ctas, descriptors.data(), (u32)ropes.size(), tiles, nullptr);
    for (u32 layer = 0; layer < layers; ++layer)
        launcher.check(keys[layer].copy() == expected[layer], "keys of layer " + std::to_string(layer) + " differ");
}
