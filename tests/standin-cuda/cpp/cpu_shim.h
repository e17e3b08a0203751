// Runs CUDA kernels on the CPU, for tests: include this, then the .cu files, and launch them with `shim::launch`.
//
// A CTA's threads are fibers of the calling thread, run in turn from barrier to barrier; every other CTA runs them in reverse
// order, so that what depends on the order between barriers shows. All state is thread-local: several threads may launch at
// once. Threads of a CTA that disagree about a barrier are an error, as is a launch of the wrong shape.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(address, size)
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __constant__ static const
#define __shared__ static thread_local

struct uint4 {
    alignas(16) unsigned x;
    unsigned y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class T>
inline T __ldg(const T* p) {
    return *p;
}
inline unsigned atomicAdd(unsigned* p, unsigned value) {
    const unsigned before = *p;
    *p += value;
    return before;
}
template <class T>
inline T __ldcs(const T* p) {
    return *p;
}
template <class T>
inline void __stcg(T* p, const T& value) {
    *p = value;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

namespace shim {

struct Dim {
    unsigned x = 1, y = 1, z = 1;
};
inline thread_local Dim thread_idx, block_idx, block_dim, grid_dim;

constexpr std::size_t STACK_BYTES = 64 << 10;
constexpr unsigned MAX_THREADS = 1024;

// What runs in a fiber: the body with its argument.
inline thread_local void (*body)(void*);
inline thread_local void* body_arg;

#if defined(__x86_64__)
// glibc's swapcontext makes a system call for each switch, and a tile takes a thousand switches.
typedef void* Context;
extern "C" void forebay_shim_switch(void** save, void* to);
asm(R"(
.text
.p2align 4
.local forebay_shim_switch
.type forebay_shim_switch, @function
forebay_shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size forebay_shim_switch, . - forebay_shim_switch
)");
inline void switch_to(Context& save, Context& to) { forebay_shim_switch(&save, to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    void** top = reinterpret_cast<void**>((reinterpret_cast<std::uintptr_t>(stack) + STACK_BYTES) & ~std::uintptr_t{15});
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context = top;
}
#else
typedef ucontext_t Context;
inline void switch_to(Context& save, Context& to) { swapcontext(&save, &to); }
inline void prepare(Context& context, char* stack, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}
#endif

struct Fiber {
    Context context;
    Dim thread;
    bool done;
};

// The fibers of the CTA that this thread runs, and their stacks, kept from launch to launch.
struct Cta {
    std::unique_ptr<Fiber[]> fibers{new Fiber[MAX_THREADS]};
    std::unique_ptr<char[]> stacks;
    unsigned stacks_for = 0;
    Context scheduler;
    Fiber* current = nullptr;
};
inline thread_local Cta cta;

inline void sync_threads() {
    Fiber* self = cta.current;
    switch_to(self->context, cta.scheduler);
    thread_idx = self->thread;
}

inline void fiber_main() {
    body(body_arg);
    cta.current->done = true;
    Context never;
    switch_to(never, cta.scheduler);
    std::abort();
}

// Runs one CTA; false where its threads disagree about a barrier.
inline bool run_cta(unsigned threads, bool reversed) {
    for (unsigned i = 0; i < threads; ++i) {
        Fiber& fiber = cta.fibers[i];
        fiber.thread = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
        fiber.done = false;
        // A fiber ends without a return: what AddressSanitizer marked in its stack stays marked.
        ASAN_UNPOISON_MEMORY_REGION(&cta.stacks[i * STACK_BYTES], STACK_BYTES);
        prepare(fiber.context, &cta.stacks[i * STACK_BYTES], fiber_main);
    }
    for (;;) {
        unsigned done = 0;
        for (unsigned i = 0; i < threads; ++i) {
            Fiber& fiber = cta.fibers[reversed ? threads - 1 - i : i];
            cta.current = &fiber;
            thread_idx = fiber.thread;
            switch_to(cta.scheduler, fiber.context);
            done += fiber.done;
        }
        if (done == threads) return true;
        if (done != 0) return false;
    }
}

// Runs `kernel()` for every thread of every CTA. 0, or 2 where threads disagree about a barrier, or 3 for a bad shape.
template <class Kernel>
int launch(Dim grid, Dim block, Kernel kernel) {
    const unsigned long long threads = 1ull * block.x * block.y * block.z;
    if (threads == 0 || threads > MAX_THREADS || grid.x == 0 || grid.y == 0 || grid.z == 0) return 3;
    if (cta.stacks_for < threads) {
        cta.stacks.reset(new char[threads * STACK_BYTES]);
        cta.stacks_for = threads;
    }
    grid_dim = grid;
    block_dim = block;
    body = [](void* arg) { (*static_cast<Kernel*>(arg))(); };
    body_arg = &kernel;
    struct Forget {
        ~Forget() { body_arg = nullptr; }
    } forget;
    bool reversed = false;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x, reversed = !reversed) {
                block_idx = {x, y, z};
                if (!run_cta(threads, reversed)) return 2;
            }
        }
    }
    return 0;
}

}  // namespace shim

#define threadIdx shim::thread_idx
#define blockIdx shim::block_idx
#define blockDim shim::block_dim
#define gridDim shim::grid_dim
#define __syncthreads() shim::sync_threads()
