// Shared by the kernels' tests: noise, exact allocations, and a CRC that is computed byte by byte.
#pragma once
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../standin-cuda/cpp/kernels.cpp"

struct Random {
    u64 state;
    explicit Random(u64 seed) : state(seed * 0x9e3779b97f4a7c15ull + 0x1234567ull) {}
    u64 next() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state * 0x2545f4914f6cdd1dull;
    }
    // From low to high, both included.
    u32 between(u32 low, u32 high) { return low + (u32)(next() >> 33) % (high - low + 1); }
    bool one_in(u32 n) { return between(1, n) == 1; }
    template <class T>
    T of(std::initializer_list<T> choices) {
        return choices.begin()[between(0, (u32)choices.size() - 1)];
    }
};

// Memory of exactly `size` bytes, so that AddressSanitizer sees the first byte beyond, at an address that is a multiple of
// 16 plus `shift`.
class Memory {
  public:
    explicit Memory(std::size_t size, std::size_t shift = 0)
        : size_(size), raw_(static_cast<u8*>(std::malloc(size + shift))), data_(raw_ + shift) {}
    Memory(Memory&& other) noexcept : size_(other.size_), raw_(other.raw_), data_(other.data_) { other.raw_ = nullptr; }
    Memory(const Memory&) = delete;
    ~Memory() { std::free(raw_); }
    u8* data() const { return data_; }
    u64 address() const { return reinterpret_cast<u64>(data_); }
    std::size_t size() const { return size_; }
    void fill(Random& random) {
        for (std::size_t i = 0; i < size_; ++i) data_[i] = (u8)(random.next() >> 40);
    }
    std::vector<u8> copy() const { return std::vector<u8>(data_, data_ + size_); }

  private:
    std::size_t size_;
    u8* raw_;
    u8* data_;
};

template <class T>
Memory memory_of(const std::vector<T>& values) {
    Memory memory(values.size() * sizeof(T));
    if (!values.empty()) std::memcpy(memory.data(), values.data(), memory.size());
    return memory;
}

// The register of CRC-32 after `bytes` bytes and zeros up to a multiple of 4096, begun at zero and not inverted.
inline u32 raw_crc(const u8* data, std::size_t bytes) {
    static u32 table[256];
    if (table[1] == 0) {
        for (u32 i = 0; i < 256; ++i) {
            u32 value = i;
            for (int bit = 0; bit < 8; ++bit) value = value & 1 ? value >> 1 ^ 0xedb88320u : value >> 1;
            table[i] = value;
        }
    }
    u32 state = 0;
    const std::size_t padded = (bytes + 4095) / 4096 * 4096;
    for (std::size_t i = 0; i < padded; ++i) state = state >> 8 ^ table[(state ^ (i < bytes ? data[i] : 0)) & 255];
    return state;
}

// Multiplier and shift for a divisor, as the host computes them (src/device/cuda/plane.rs).
inline void make_divisor(u32 d, u32& mul, u32& shift) {
    u32 log = 0;
    while (1ull << log < d) ++log;
    shift = 31 + log;
    mul = (u32)((1ull << shift) / d + 1);
}

// Runs a kernel by its name. Failures print the case that is being tested.
struct Launcher {
    std::string what;
    void fail(const std::string& why) const {
        std::fprintf(stderr, "FAILED: %s\n  %s\n", why.c_str(), what.c_str());
        std::exit(1);
    }
    void check(bool ok, const std::string& why) const {
        if (!ok) fail(why);
    }
    void run(const char* name, u32 ctas, const void* descriptors, u32 count, u32 tiles, u32* crcs) const {
        void* args[4] = {&descriptors, &count, &tiles, &crcs};
        const unsigned grid[3] = {ctas, 1, 1}, block[3] = {256, 1, 1};
        const int code = forebay_shim_launch(name, grid, block, args);
        if (code != 0) fail(std::string(name) + " returned " + std::to_string(code));
    }
};

