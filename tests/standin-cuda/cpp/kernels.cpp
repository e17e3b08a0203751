// The kernels as C++, launched by name: what a stand-in driver calls for cuLaunchKernel.
#include "cpu_shim.h"

#include "../../../kernels/common.cu"
#include "../../../kernels/reshape.cu"
#include "../../../kernels/exp4.cu"
#include "../../../kernels/rope.cu"

namespace {

template <class T>
T argument(void** args, unsigned i) {
    T value;
    std::memcpy(&value, args[i], sizeof value);
    return value;
}

// Every kernel takes descriptors, their number, the number of tiles, and an address of words.
template <class Descriptor, void (*KERNEL)(const Descriptor*, u32, u32, u32*)>
int run(shim::Dim grid, shim::Dim block, void** args) {
    const Descriptor* descriptors = argument<const Descriptor*>(args, 0);
    const u32 count = argument<u32>(args, 1), num_tiles = argument<u32>(args, 2);
    u32* tile_crcs = argument<u32*>(args, 3);
    return shim::launch(grid, block, [=] { KERNEL(descriptors, count, num_tiles, tile_crcs); });
}

}  // namespace

// 0; 1: no kernel of this name; 2: threads of a CTA disagree about a barrier; 3: a shape that the kernels are not made for.
extern "C" int forebay_shim_launch(const char* name, const unsigned grid[3], const unsigned block[3], void** args) {
    static const struct {
        const char* name;
        int (*run)(shim::Dim, shim::Dim, void**);
    } kernels[] = {
        {"forebay_scatter", run<Plane, forebay_scatter>},
        {"forebay_scatter_crc", run<Plane, forebay_scatter_crc>},
        {"forebay_gather", run<Plane, forebay_gather>},
        {"forebay_gather_crc", run<Plane, forebay_gather_crc>},
        {"forebay_decode_exp4", run<Coded, forebay_decode_exp4>},
        {"forebay_encode_exp4", run<Coded, forebay_encode_exp4>},
        {"forebay_list_exp4", run<Coded, forebay_list_exp4>},
        {"forebay_upload", run<Group, forebay_upload>},
        {"forebay_rope_shift", run<Rope, forebay_rope_shift>},
    };
    if (block[0] != FOREBAY_THREADS || block[1] != 1 || block[2] != 1 || grid[1] != 1 || grid[2] != 1) return 3;
    const shim::Dim g{grid[0], grid[1], grid[2]}, b{block[0], block[1], block[2]};
    for (const auto& entry : kernels) {
        if (std::strcmp(name, entry.name) == 0) return entry.run(g, b, args);
    }
    return 1;
}
