// Memory: allocation table, registered ranges, copies, what a pointer is.
#include "standin.h"
#include <cstdio>
#include <sys/mman.h>

static constexpr size_t GRAIN = 64 << 10;
static size_t grains(size_t n) { return (n + GRAIN - 1) / GRAIN * GRAIN; }

// Guard pages lie on both sides, so that a kernel that writes out of bounds faults.
static void* guarded(size_t n) {
  size_t body = grains(n), all = body + 3 * GRAIN;
  char* p = (char*)mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  char* at = (char*)(((uintptr_t)p + 2 * GRAIN - 1) / GRAIN * GRAIN);
  if (mprotect(at, body, PROT_READ | PROT_WRITE)) return nullptr;
  memset(at, 0xcd, body); // never zero, so that code that relies on zeros fails
  return at;
}

static bool inside(const std::map<Ptr, std::pair<size_t, int>>& m, Ptr p, size_t n, Ptr* base, size_t* len, int* ordinal) {
  auto it = m.upper_bound(p);
  if (it == m.begin()) return false;
  --it;
  Ptr end = it->first + it->second.first;
  if (p >= end || n > end - p) return false;
  if (base) *base = it->first;
  if (len) *len = it->second.first;
  if (ordinal) *ordinal = it->second.second;
  return true;
}
bool in_device(Lock&, Ptr p, size_t n) { return inside(G().allocations, p, n, nullptr, nullptr, nullptr); }
bool in_registered(Lock&, Ptr p, size_t n) {
  auto it = G().registered.upper_bound(p);
  if (it == G().registered.begin()) return false;
  --it;
  Ptr end = it->first + it->second;
  return p < end && n <= end - p;
}

API int cuMemAlloc_v2(Ptr* out, size_t n) {
  ENTER();
  Lock lock(G().mu);
  Ctx* c = current();
  if (!c) return INVALID_CONTEXT;
  if (int e = unsafe_call(lock)) return e;
  if (!n) return INVALID_VALUE;
  if (n > c->total - c->used) return OUT_OF_MEMORY;
  void* p = guarded(n);
  if (!p) return OUT_OF_MEMORY;
  c->used += n;
  G().allocations[(Ptr)p] = {n, c->ordinal};
  *out = (Ptr)p;
  return OK;
}
API int cuMemFree_v2(Ptr p) {
  ENTER();
  Lock lock(G().mu);
  auto it = G().allocations.find(p);
  if (it == G().allocations.end()) return INVALID_VALUE;
  // As in CUDA, freeing waits for work that may use the memory.
  std::vector<DonePtr> pending;
  for (auto& [h, s] : G().streams)
    if (s->ctx->ordinal == it->second.second && s->tail && !s->tail->set) pending.push_back(s->tail);
  if (!pending.empty()) G().counters["frees_that_wait"]++;
  for (auto& d : pending) wait_done(lock, d);
  it = G().allocations.find(p);
  if (it == G().allocations.end()) return INVALID_VALUE;
  G().ctx[it->second.second].used -= it->second.first;
  munmap((void*)p, grains(it->second.first));
  G().allocations.erase(it);
  return OK;
}
API int cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER();
  Lock lock(G().mu);
  if (!current()) return INVALID_CONTEXT;
  *total = current()->total;
  *free = current()->total - current()->used;
  return OK;
}
API int cuMemHostRegister_v2(void* p, size_t n, unsigned) {
  ENTER();
  Lock lock(G().mu);
  if (!current()) return INVALID_CONTEXT;
  if (G().refuse_register || !p || !n) return INVALID_VALUE;
  if (int e = unsafe_call(lock)) return e;
  if (G().registered.count((Ptr)p)) return ALREADY_REGISTERED;
  G().registered[(Ptr)p] = n;
  return OK;
}
API int cuMemHostUnregister(void* p) {
  ENTER();
  Lock lock(G().mu);
  return G().registered.erase((Ptr)p) ? OK : NOT_REGISTERED;
}
API int cuMemHostAlloc(void** out, size_t n, unsigned) {
  ENTER();
  if (posix_memalign(out, 4096, n ? n : 1)) return OUT_OF_MEMORY;
  Lock lock(G().mu);
  G().registered[(Ptr)*out] = n;
  return OK;
}
API int cuMemAllocHost_v2(void** out, size_t n) { return cuMemHostAlloc(out, n, 0); }
API int cuMemFreeHost(void* p) {
  ENTER();
  Lock lock(G().mu);
  if (!G().registered.erase((Ptr)p)) return INVALID_VALUE;
  free(p);
  return OK;
}
API int cuMemHostGetDevicePointer_v2(Ptr* out, void* p, unsigned) {
  ENTER();
  Lock lock(G().mu);
  if (!in_registered(lock, (Ptr)p, 1)) return INVALID_VALUE;
  *out = (Ptr)p;
  return OK;
}
API int cuMemHostGetFlags(unsigned* f, void* p) {
  ENTER();
  Lock lock(G().mu);
  if (!in_registered(lock, (Ptr)p, 1)) return INVALID_VALUE;
  *f = 0;
  return OK;
}

// Copies from or to pageable memory are over when the call returns.
static int copy(void* to, const void* from, size_t n, void* h, bool to_device, bool from_device) {
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  if (to_device && !in_device(lock, (Ptr)to, n)) return INVALID_VALUE;
  if (from_device && !in_device(lock, (Ptr)from, n)) return INVALID_VALUE;
  bool pageable = (!to_device && !in_registered(lock, (Ptr)to, n)) || (!from_device && !in_registered(lock, (Ptr)from, n));
  G().counters["copies"]++;
  G().counters["copy_bytes"] += n;
  if (pageable) G().counters["pageable_copies"]++;
  if (pageable && s->capture) { invalidate(*s); return CAPTURE_UNSUPPORTED; }
  DonePtr done;
  int rc = submit(lock, s, [=] { memmove(to, from, n); return 0; }, {}, &done);
  if (!rc && pageable) wait_done(lock, done);
  return rc;
}
API int cuMemcpyHtoDAsync_v2(Ptr d, const void* s, size_t n, void* h) { ENTER(); return copy((void*)d, s, n, h, true, false); }
API int cuMemcpyDtoHAsync_v2(void* d, Ptr s, size_t n, void* h) { ENTER(); return copy(d, (void*)s, n, h, false, true); }
API int cuMemcpyDtoDAsync_v2(Ptr d, Ptr s, size_t n, void* h) { ENTER(); return copy((void*)d, (void*)s, n, h, true, true); }
static bool is_device(const void* p) { Lock lock(G().mu); return in_device(lock, (Ptr)p, 1); }
API int cuMemcpyAsync(Ptr d, Ptr s, size_t n, void* h) {
  ENTER();
  return copy((void*)d, (void*)s, n, h, is_device((void*)d), is_device((void*)s));
}
static int copy_now(void* d, const void* s, size_t n, bool to_device, bool from_device) {
  int rc = copy(d, s, n, nullptr, to_device, from_device);
  Lock lock(G().mu);
  auto stream = find_stream(lock, nullptr);
  if (!rc && stream) wait_done(lock, stream->tail);
  return rc;
}
API int cuMemcpyHtoD_v2(Ptr d, const void* s, size_t n) { ENTER(); return copy_now((void*)d, s, n, true, false); }
API int cuMemcpyDtoH_v2(void* d, Ptr s, size_t n) { ENTER(); return copy_now(d, (void*)s, n, false, true); }
API int cuMemcpyDtoD_v2(Ptr d, Ptr s, size_t n) { ENTER(); return copy_now((void*)d, (void*)s, n, true, true); }
API int cuMemcpy(Ptr d, Ptr s, size_t n) { ENTER(); return copy_now((void*)d, (void*)s, n, is_device((void*)d), is_device((void*)s)); }
API int cuMemsetD8Async(Ptr d, unsigned char v, size_t n, void* h) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  if (!in_device(lock, d, n)) return INVALID_VALUE;
  G().counters["memsets"]++;
  return submit(lock, s, [=] { memset((void*)d, v, n); return 0; });
}
API int cuMemsetD8_v2(Ptr d, unsigned char v, size_t n) { return cuMemsetD8Async(d, v, n, nullptr); }

// Answers as cuFile needs them: the attributes of a plain allocation, and "host" for everything else.
static int attribute(Lock&, void* out, int what, Ptr p) {
  Ptr base = 0;
  size_t len = 0;
  int ordinal = -2;
  bool d = inside(G().allocations, p, 1, &base, &len, &ordinal);
  switch (what) {
    case 1: *(void**)out = d ? &G().ctx[ordinal] : nullptr; break;
    case 2: if (d) *(unsigned*)out = 2; break;
    case 3: if (d) *(Ptr*)out = p; break;
    case 4: return INVALID_VALUE;
    case 7: *(Ptr*)out = base; break;
    case 9: *(int*)out = ordinal; break;
    case 10: *(unsigned*)out = 1; return OK;
    case 11: *(Ptr*)out = base; break;
    case 12: *(size_t*)out = len; break;
    case 13: *(unsigned*)out = d; return OK;
    default: *(unsigned*)out = 0; return OK;
  }
  return d ? OK : INVALID_VALUE;
}
API int cuPointerGetAttribute(void* out, int what, Ptr p) { ENTER(); Lock lock(G().mu); return attribute(lock, out, what, p); }
API int cuPointerGetAttributes(unsigned n, int* what, void** out, Ptr p) {
  ENTER();
  Lock lock(G().mu);
  for (unsigned i = 0; i < n; i++)
    if (attribute(lock, out[i], what[i], p) && what[i] == 2) *(unsigned*)out[i] = 0;
  return OK;
}
API int cuPointerSetAttribute(const void*, int, Ptr) { ENTER(); return OK; }
API int cuMemGetAddressRange_v2(Ptr* base, size_t* len, Ptr p) {
  ENTER();
  Lock lock(G().mu);
  Ptr b;
  size_t n;
  if (!inside(G().allocations, p, 1, &b, &n, nullptr)) return NOT_FOUND;
  if (base) *base = b;
  if (len) *len = n;
  return OK;
}
