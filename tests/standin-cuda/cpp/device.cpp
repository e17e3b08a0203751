// Devices, primary contexts, modules and launches.
#include "standin.h"
#include <cstdio>
#include <cstdlib>
#include <pthread.h>

extern "C" __attribute__((weak)) int forebay_shim_launch(const char* name, const unsigned grid[3], const unsigned block[3], void** args);

static thread_local Ctx* current_ctx = nullptr;
Ctx* current() { return current_ctx; }

// Calls that a test makes as the server are neither counted nor failed.
static thread_local bool is_server = false;
API void standin_server(int on) { is_server = on; }

int enter(const char* name) {
  if (is_server) return OK;
  Lock lock(G().mu);
  State& g = G();
  g.calls[name]++;
  g.counters["calls"]++;
  Injection& i = g.injection;
  if (i.nth && (i.name.empty() || i.name == name) && --i.nth == 0) {
    i.hit = name;
    if (i.code == ILLEGAL_ADDRESS && current_ctx) current_ctx->sticky = i.code;
    return i.code;
  }
  return current_ctx && strncmp(name, "cuCtx", 5) && strncmp(name, "cuDevice", 8) && strstr(name, "Destroy") == nullptr &&
                 strstr(name, "Free") == nullptr && strstr(name, "Unregister") == nullptr
             ? current_ctx->sticky : OK;
}

API int cuInit(unsigned) {
  ENTER();
  Lock lock(G().mu);
  if (!G().ready) {
    for (int i = 0; i < 8; i++) G().ctx[i].ordinal = i;
    if (const char* n = getenv("STANDIN_CUDA_DEVICES")) G().devices = atoi(n);
    if (const char* n = getenv("STANDIN_CUDA_MEMORY")) for (auto& c : G().ctx) c.total = strtoull(n, nullptr, 10);
    if (const char* n = getenv("STANDIN_CUDA_DRIVER")) G().driver_version = atoi(n);
    // A stream's thread may have the lock when a process forks; the child must still be able to take it.
    pthread_atfork([] { G().mu.lock(); }, [] { G().mu.unlock(); }, [] { G().mu.unlock(); });
    G().ready = true;
  }
  return G().devices ? OK : NO_DEVICE;
}
API int cuDriverGetVersion(int* v) { ENTER(); *v = G().driver_version; return OK; }
API int cuDeviceGetCount(int* n) { ENTER(); if (!G().ready) return NOT_INITIALIZED; *n = G().devices; return OK; }
API int cuDeviceGet(int* d, int ordinal) {
  ENTER();
  if (!G().ready) return NOT_INITIALIZED;
  if (ordinal < 0 || ordinal >= G().devices) return INVALID_DEVICE;
  *d = ordinal;
  return OK;
}
API int cuDeviceGetName(char* out, int len, int d) { ENTER(); snprintf(out, len, "Stand-in %d", d); return OK; }
API int cuDeviceTotalMem_v2(size_t* out, int d) { ENTER(); *out = G().ctx[d].total; return OK; }
API int cuDeviceGetPCIBusId(char* out, int len, int d) { ENTER(); snprintf(out, len, "0000:F%d:1F.7", d); return OK; }
API int cuDeviceGetUuid_v2(void* out, int d) { ENTER(); memset(out, 7 + d, 16); return OK; }
API int cuDeviceGetUuid(void* out, int d) { return cuDeviceGetUuid_v2(out, d); }
API int cuDeviceGetAttribute(int* out, int what, int d) {
  ENTER();
  switch (what) {
    case 1: *out = 1024; break;   // threads per block
    case 16: *out = 132; break;   // multiprocessors
    case 19: case 41: case 91: *out = 1; break; // mapped host memory, unified addresses, registered host pointers
    case 33: *out = 0xf0 + d; break;            // PCI bus
    case 34: *out = 0x1f; break;                // PCI device
    case 40: *out = 3; break;                   // copy engines
    case 75: *out = getenv("STANDIN_CUDA_SM") ? atoi(getenv("STANDIN_CUDA_SM")) : 9; break;
    default: *out = 0;
  }
  return OK;
}

API int cuDevicePrimaryCtxRetain(void** out, int d) {
  ENTER();
  if (d < 0 || d >= G().devices) return INVALID_DEVICE;
  Lock lock(G().mu);
  G().ctx[d].retained++;
  *out = &G().ctx[d];
  return OK;
}
API int cuDevicePrimaryCtxRelease_v2(int d) {
  ENTER();
  Lock lock(G().mu);
  if (!G().ctx[d].retained) return INVALID_CONTEXT;
  G().ctx[d].retained--;
  return OK;
}
API int cuDevicePrimaryCtxReset_v2(int) { ENTER(); Lock lock(G().mu); G().counters["context_resets"]++; return OK; }
API int cuDevicePrimaryCtxGetState(int d, unsigned* flags, int* active) { ENTER(); *flags = 0; *active = G().ctx[d].retained > 0; return OK; }
API int cuCtxGetCurrent(void** out) { ENTER(); *out = current_ctx; return OK; }
API int cuCtxSetCurrent(void* c) { ENTER(); current_ctx = (Ctx*)c; return OK; }
static thread_local std::vector<Ctx*> stack;
API int cuCtxPushCurrent_v2(void* c) { ENTER(); stack.push_back(current_ctx); current_ctx = (Ctx*)c; return OK; }
API int cuCtxPopCurrent_v2(void** out) {
  ENTER();
  if (out) *out = current_ctx;
  if (stack.empty()) return INVALID_CONTEXT;
  current_ctx = stack.back();
  stack.pop_back();
  return OK;
}
API int cuCtxGetDevice(int* d) { ENTER(); if (!current_ctx) return INVALID_CONTEXT; *d = current_ctx->ordinal; return OK; }
API int cuCtxCreate_v2(void** out, unsigned, int d) { ENTER(); *out = current_ctx = &G().ctx[d]; return OK; }
API int cuCtxDestroy_v2(void*) { ENTER(); Lock lock(G().mu); G().counters["context_resets"]++; return OK; }
API int cuCtxGetStreamPriorityRange(int* least, int* greatest) { ENTER(); if (least) *least = 0; if (greatest) *greatest = -5; return OK; }
API int cuCtxSynchronize() {
  ENTER();
  Lock lock(G().mu);
  G().counters["context_syncs"]++;
  std::vector<DonePtr> all;
  for (auto& [h, s] : G().streams) if (s->tail) all.push_back(s->tail);
  for (auto& d : all) wait_done(lock, d);
  return OK;
}

// The kernels of a module by their entries in its PTX, with the bytes of each parameter.
struct Kernel { Ctx* ctx; std::string name; std::vector<size_t> params; };
static std::map<void*, std::vector<Kernel>>& modules() { static auto& m = *new std::map<void*, std::vector<Kernel>>; return m; }

static size_t bytes_of(const std::string& decl) {
  size_t at = decl.find('['), count = 1;
  if (at != std::string::npos) count = strtoul(decl.c_str() + at + 1, nullptr, 10);
  for (auto [name, bytes] : {std::pair{"64 ", 8}, {"32 ", 4}, {"16 ", 2}, {"8 ", 1}})
    for (const char* kind : {".u", ".b", ".s", ".f"})
      if (decl.find(kind + std::string(name)) != std::string::npos) return bytes * count;
  return 0;
}

API int cuModuleLoadData(void** out, const void* image) {
  ENTER();
  Lock lock(G().mu);
  if (!current_ctx) return INVALID_CONTEXT;
  if (int e = unsafe_call(lock)) return e;
  std::string ptx((const char*)image);
  if (ptx.find(".version") == std::string::npos) return INVALID_PTX;
  std::vector<Kernel> kernels;
  for (size_t at = 0; (at = ptx.find(".entry ", at)) != std::string::npos;) {
    at += 7;
    size_t open = ptx.find('(', at), close = ptx.find(')', open);
    Kernel k{current_ctx, ptx.substr(at, open - at), {}};
    for (size_t p = open; (p = ptx.find(".param", p)) != std::string::npos && p < close;) {
      size_t end = std::min(ptx.find(',', p), close);
      k.params.push_back(bytes_of(ptx.substr(p, end - p) + " "));
      p = end;
    }
    kernels.push_back(k);
  }
  *out = (void*)(G().next_handle += 16);
  modules()[*out] = kernels;
  G().counters["live_modules"]++;
  return OK;
}
API int cuModuleLoadDataEx(void** out, const void* image, unsigned, void*, void*) { return cuModuleLoadData(out, image); }
API int cuModuleUnload(void* m) {
  ENTER();
  Lock lock(G().mu);
  if (!modules().erase(m)) return INVALID_HANDLE;
  G().counters["live_modules"]--;
  return OK;
}
API int cuModuleGetFunction(void** out, void* m, const char* name) {
  ENTER();
  Lock lock(G().mu);
  auto it = modules().find(m);
  if (it == modules().end()) return INVALID_HANDLE;
  for (auto& k : it->second) if (k.name == name) { *out = &k; return OK; }
  return NOT_FOUND;
}
API int cuFuncGetAttribute(int* out, int, void* f) { ENTER(); *out = 32; return f ? OK : INVALID_HANDLE; }
API int cuFuncSetAttribute(void*, int, int) { ENTER(); return OK; }
API int cuLaunchKernel(void* f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, void* h,
                       void** params, void**) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  const Kernel* found = nullptr;
  for (auto& [m, ks] : modules()) for (auto& k : ks) if (&k == f) found = &k;
  if (!found || found->ctx != s->ctx || !forebay_shim_launch) return INVALID_HANDLE;
  if (!gx || !gy || !gz || !bx || !by || !bz || bx * by * bz > 1024) return INVALID_VALUE;
  auto values = std::make_shared<std::vector<std::vector<uint64_t>>>();
  for (size_t i = 0; i < found->params.size(); i++) {
    values->emplace_back((found->params[i] + 7) / 8 + 1);
    memcpy(values->back().data(), params[i], found->params[i]);
  }
  State& g = G();
  // Copies of descriptors are counted apart from the kernels that they are for.
  g.counters[found->name == "forebay_upload" ? "uploads" : "launches"]++;
  g.counters["largest_grid"] = std::max<uint64_t>(g.counters["largest_grid"], (uint64_t)gx * gy * gz);
  std::string name = found->name;
  return submit(lock, s, [=] {
    unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
    std::vector<void*> args;
    for (auto& v : *values) args.push_back(v.data());
    return forebay_shim_launch(name.c_str(), grid, block, args.data()) ? LAUNCH_FAILED : 0;
  });
}

API int cuGetErrorName(int code, const char** out) {
  static const std::map<int, const char*> names = {
      {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
      {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"},
      {218, "CUDA_ERROR_INVALID_PTX"}, {222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
      {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"}, {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
      {719, "CUDA_ERROR_LAUNCH_FAILED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"}, {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
      {999, "CUDA_ERROR_UNKNOWN"}};
  auto it = names.find(code);
  *out = it == names.end() ? nullptr : it->second;
  return it == names.end() ? INVALID_VALUE : OK;
}
API int cuGetErrorString(int code, const char** out) { return cuGetErrorName(code, out); }
