// The codec exp4: the kernels against plain loops, byte for byte, in allocations that end where the
// extents do.
#pragma once
#include <algorithm>

#include "support.h"

// The coded extent (docs/format.md); empty where there are more escapes than fit.
inline std::vector<u8> exp4_encoded(const std::vector<u16>& extent, std::size_t bytes) {
    std::vector<u8> coded(bytes, 0);
    const std::size_t blocks = (extent.size() + 127) / 128, segments = (blocks + 127) / 128;
    const std::size_t tail = blocks * 192, list = tail + segments * 20, room = (bytes - list) / 3;
    std::vector<u16> values = extent;
    values.resize(blocks * 128, 0);
    std::size_t listed = 0;
    for (std::size_t segment = 0; segment < segments; ++segment) {
        const std::size_t from = segment * 16384, end = std::min(values.size(), from + 16384);
        std::vector<u8> dictionary;
        std::vector<std::size_t> escapes;
        for (const std::size_t step : {13, 1}) {
            u32 counts[256] = {};
            for (std::size_t at = from; at < end; at += step) ++counts[values[at] >> 7 & 255];
            // The most frequent first, of equally frequent ones the lowest; then those that were
            // not seen, from below the highest downwards.
            std::vector<u32> order;
            u32 highest = 0;
            for (u32 e = 0; e < 256; ++e) {
                if (counts[e] > 0) order.push_back(highest = e);
            }
            std::stable_sort(order.begin(), order.end(), [&](u32 a, u32 b) { return counts[a] > counts[b]; });
            for (u32 e = highest; e-- > 0;) {
                if (counts[e] == 0) order.push_back(e);
            }
            for (u32 e = highest + 1; e < 256; ++e) order.push_back(e);
            dictionary.assign(order.begin(), order.begin() + 16);
            std::sort(dictionary.begin(), dictionary.end());
            escapes.clear();
            for (std::size_t at = from; at < end; ++at) {
                const bool has = std::binary_search(dictionary.begin(), dictionary.end(), (u8)(values[at] >> 7));
                if (!has && at < extent.size()) escapes.push_back(at);
            }
            if (escapes.size() <= 32) break;
        }
        for (std::size_t at = from; at < end; ++at) {
            const auto found = std::lower_bound(dictionary.begin(), dictionary.end(), (u8)(values[at] >> 7));
            const bool has = found != dictionary.end() && *found == (u8)(values[at] >> 7);
            const u32 code = has ? (u32)(found - dictionary.begin()) : 0;
            u8* block = coded.data() + at / 128 * 192;
            block[at % 64] |= (u8)(code << (at % 128 < 64 ? 0 : 4));
            block[64 + at % 128] = (u8)((values[at] >> 8 & 0x80) | (values[at] & 0x7f));
        }
        if (listed + escapes.size() > room) return {};
        for (const std::size_t at : escapes) {
            const u8 escape[3] = {(u8)(at - from), (u8)((at - from) >> 8), (u8)(values[at] >> 7)};
            std::memcpy(coded.data() + list + 3 * listed++, escape, 3);
        }
        std::memcpy(coded.data() + tail + 20 * segment, dictionary.data(), 16);
        const u32 count = (u32)listed;
        std::memcpy(coded.data() + tail + 20 * segment + 16, &count, 4);
    }
    return coded;
}

// The values of any bytes. Where escapes are damaged, two may have one place, and either may count.
inline std::vector<u16> exp4_decoded(const std::vector<u8>& coded, std::size_t count) {
    const std::size_t blocks = (count + 127) / 128, segments = (blocks + 127) / 128;
    const std::size_t tail = blocks * 192, list = tail + segments * 20, room = (coded.size() - list) / 3;
    std::vector<u16> values(blocks * 128);
    for (std::size_t at = 0; at < values.size(); ++at) {
        const u8* block = coded.data() + at / 128 * 192;
        const u32 code = block[at % 64] >> (at % 128 < 64 ? 0 : 4) & 15, byte = block[64 + at % 128];
        const u32 exponent = coded[tail + at / 16384 * 20 + code];
        values[at] = (u16)((byte & 0x80) << 8 | exponent << 7 | (byte & 0x7f));
    }
    u32 before = 0;
    for (std::size_t segment = 0; segment < segments; ++segment) {
        u32 end;
        std::memcpy(&end, coded.data() + tail + segment * 20 + 16, 4);
        end = std::min(end, (u32)room);
        for (u32 i = before; i < end; ++i) {
            const u8* escape = coded.data() + list + 3 * i;
            const std::size_t place = escape[0] | escape[1] << 8, at = segment * 16384 + place;
            if (place < 16384 && at < values.size()) values[at] = (u16)((values[at] & 0x807f) | escape[2] << 7);
        }
        before = end;
    }
    return values;
}

inline std::size_t exp4_bytes(std::size_t count) {
    const std::size_t blocks = (count + 127) / 128, segments = (blocks + 127) / 128;
    return (blocks * 192 + segments * 20 + (count + 1023) / 1024 * 3 + 4095) / 4096 * 4096;
}

inline std::vector<u16> exp4_values(Random& random) {
    const u32 count = random.of({1u, 8u, 63u, 64u, 127u, 128u, 129u, 16383u, 16384u, 16385u, random.between(1, 3000),
                                 random.between(1, 50000)});
    // Numbers of exponents, up to more than have codes, from any exponent on; one value in `others`
    // has a random exponent.
    const u32 kinds = random.of({1u, 3u, 16u, 16u, 17u}), base = random.between(0, 255);
    const u32 others = random.of({0u, 3000u, 900u, 200u, 30u});
    const bool unseen = random.one_in(3);
    std::vector<u16> values(count);
    for (u32 at = 0; at < count; ++at) {
        const u32 noise = (u32)(random.next() >> 32);
        u32 exponent = base + noise % kinds;
        // `unseen`: the sample sees none of them, so the likely dictionary has no codes for them.
        if (others != 0 && random.one_in(others) && (!unseen || at % 13 != 0)) exponent = noise >> 8;
        values[at] = (u16)((noise >> 16 & 0x807f) | (exponent & 255) << 7);
    }
    // As many escapes as there is room for, or one more.
    if (kinds == 16 && others == 0 && count > 2000) {
        const std::size_t blocks = (count + 127) / 128, segments = (blocks + 127) / 128;
        const std::size_t room = (exp4_bytes(count) - blocks * 192 - segments * 20) / 3;
        for (std::size_t at = 0, left = room + random.between(0, 1); left > 0; ++at, --left)
            values[at] = (u16)((values[at] & 0x807f) | (base + 16 + random.between(0, 239) & 255) << 7);
    }
    return values;
}

inline void test_exp4(Random& random, Launcher& launcher) {
    std::vector<std::vector<u16>> values;
    std::vector<Memory> raw, coded;
    std::vector<Coded> extents;
    u32 segments = 0;
    for (u32 i = random.between(1, 3); i > 0; --i) {
        values.push_back(exp4_values(random));
        const std::size_t count = values.back().size(), blocks = (count + 127) / 128;
        // Behind the values is room for the segments' numbers of escapes.
        raw.emplace_back(blocks * 256 + (blocks + 127) / 128 * 4);
        raw.back().fill(random);
        std::memcpy(raw.back().data(), values.back().data(), 2 * count);
        coded.emplace_back(exp4_bytes(count));
        coded.back().fill(random);
        Coded extent{};
        extent.coded = coded.back().address();
        extent.raw = raw.back().address();
        extent.values = (u32)count;
        extent.bytes = (u32)coded.back().size();
        extent.first_tile = segments;
        segments += (u32)((blocks + 127) / 128);
        extents.push_back(extent);
    }
    const u32 count = (u32)extents.size(), ctas = random.of({1u, 2u, 7u, 40u});
    Memory descriptors = memory_of(extents), fits(count * sizeof(u32));
    u32* const fit = reinterpret_cast<u32*>(fits.data());
    std::fill(fit, fit + count, 7u);
    launcher.run("forebay_encode_exp4", ctas, descriptors.data(), count, segments, nullptr);
    launcher.run("forebay_list_exp4", ctas, descriptors.data(), count, segments, fit);
    std::vector<u32> kinds;
    for (u32 i = 0; i < count; ++i) {
        const std::vector<u8> expected = exp4_encoded(values[i], coded[i].size());
        const std::string which = " of extent " + std::to_string(i) + ", " + std::to_string(values[i].size()) + " values";
        launcher.check(fit[i] == !expected.empty(), "whether it fits" + which);
        launcher.check(expected.empty() || coded[i].copy() == expected, "coded bytes" + which);
        launcher.check(std::memcmp(raw[i].data(), values[i].data(), 2 * values[i].size()) == 0, "values changed" + which);
        // Decoded are the coded bytes (0), noise without escapes (1), or noise (2): its escapes
        // must change nothing outside the values.
        kinds.push_back(expected.empty() ? random.between(1, 2) : random.of({0u, 0u, 1u, 2u}));
        if (kinds[i] > 0) coded[i].fill(random);
        if (kinds[i] == 1) {
            const std::size_t blocks = (values[i].size() + 127) / 128, tail = blocks * 192;
            for (std::size_t segment = 0; segment < (blocks + 127) / 128; ++segment)
                std::memset(coded[i].data() + tail + segment * 20 + 16, 0, 4);
        }
        raw[i].fill(random);
    }
    std::vector<std::vector<u8>> before;
    for (const Memory& memory : coded) before.push_back(memory.copy());
    launcher.run("forebay_decode_exp4", ctas, descriptors.data(), count, segments, nullptr);
    for (u32 i = 0; i < count; ++i) {
        launcher.check(coded[i].copy() == before[i], "coded bytes changed by decoding");
        const std::vector<u16> expected = exp4_decoded(before[i], values[i].size());
        const u16* got = reinterpret_cast<const u16*>(raw[i].data());
        std::size_t differing = 0;
        for (std::size_t at = 0; at < expected.size(); ++at) {
            // An escape changes only the exponent.
            launcher.check((got[at] & 0x807f) == (expected[at] & 0x807f), "sign and mantissa of value " + std::to_string(at));
            differing += got[at] != expected[at];
        }
        launcher.check(kinds[i] == 2 || differing == 0, "decoded values of extent " + std::to_string(i));
        launcher.check(kinds[i] != 0 || std::memcmp(got, values[i].data(), 2 * values[i].size()) == 0, "not what was coded");
    }
}
