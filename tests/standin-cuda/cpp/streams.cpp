// Streams, events, captures.
#include "standin.h"
#include <thread>
#include <unistd.h>

State& G() { static State& s = *new State; return s; }
static thread_local int capture_mode_of_thread = 0;

static bool all_set(const std::vector<DonePtr>& v) { for (auto& d : v) if (!d->set) return false; return true; }

static uint64_t next_random(uint64_t& x) { x ^= x << 13; x ^= x >> 7; x ^= x << 17; return x; }

static void work(StreamPtr s) {
  Lock lock(G().mu);
  for (;;) {
    s->wake.wait(lock, [&] { return s->queue.empty() ? s->stop : !s->held; });
    if (s->queue.empty()) return;
    Op op = std::move(s->queue.front());
    s->queue.pop_front();
    if (!all_set(op.after)) {
      s->waits_for = op.after;
      G().progress.notify_all();
      G().progress.wait(lock, [&] { return all_set(op.after); });
      s->waits_for.clear();
    }
    if (G().delay_us) {
      unsigned us = next_random(s->random) % G().delay_us;
      lock.unlock(); usleep(us); lock.lock();
    }
    s->wake.wait(lock, [&] { return !s->held; });
    if (op.run && !s->ctx->sticky) {
      lock.unlock();
      int rc = op.run();
      lock.lock();
      if (rc && !s->ctx->sticky) s->ctx->sticky = rc;
    }
    op.run = nullptr;
    s->executed++;
    op.done->set = true;
    G().progress.notify_all();
  }
}

static StreamPtr make_stream(Ctx* ctx, unsigned flags, int priority) {
  auto s = std::make_shared<Stream>();
  s->ctx = ctx; s->flags = flags; s->priority = priority;
  s->random = G().seed * 0x9e3779b97f4a7c15ull + ++G().next_handle;
  s->held = G().hold_new && (flags & 1);
  std::thread(work, s).detach();
  return s;
}

StreamPtr find_stream(Lock&, void* handle) {
  if ((uintptr_t)handle <= 2) {
    Ctx* c = current();
    if (!c) return nullptr;
    auto& s = G().legacy[c->ordinal];
    if (!s) s = make_stream(c, 0, 0);
    return s;
  }
  auto it = G().streams.find(handle);
  return it == G().streams.end() ? nullptr : it->second;
}

void wait_done(Lock& lock, const DonePtr& d) { if (d) G().progress.wait(lock, [&] { return d->set; }); }

void invalidate(Stream& s) { if (s.capture) s.capture->invalid = true; }

int unsafe_call(Lock&) {
  if (capture_mode_of_thread == 2) return OK; // relaxed
  bool bad = false;
  for (auto& c : G().captures) if (c->mode == 0) { c->invalid = true; bad = true; }
  return bad ? CAPTURE_UNSUPPORTED : OK;
}

int submit(Lock&, const StreamPtr& s, std::function<int()> run, std::vector<DonePtr> after, DonePtr* done) {
  auto finished = std::make_shared<Done>();
  if (done) *done = finished;
  if (s->capture) {
    if (s->capture->invalid) return CAPTURE_INVALIDATED;
    s->capture->ops++;
    G().counters["captured_ops"]++;
    return OK;
  }
  auto& legacy = G().legacy[s->ctx->ordinal];
  if (s == legacy) {
    for (auto& [h, other] : G().streams) {
      if (other->ctx != s->ctx || (other->flags & 1)) continue;
      if (other->capture) { invalidate(*other); return CAPTURE_IMPLICIT; }
      if (other->tail) after.push_back(other->tail);
    }
  } else if (!(s->flags & 1) && legacy && legacy->tail) {
    after.push_back(legacy->tail);
  }
  s->queue.push_back(Op{std::move(after), std::move(run), finished});
  s->tail = finished;
  s->wake.notify_all();
  return OK;
}

API int cuStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  ENTER();
  Lock lock(G().mu);
  if (!current()) return INVALID_CONTEXT;
  void* h = (void*)(G().next_handle += 16);
  G().streams[h] = make_stream(current(), flags, priority);
  *out = h;
  return OK;
}
API int cuStreamCreate(void** out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }

API int cuStreamDestroy_v2(void* h) {
  ENTER();
  Lock lock(G().mu);
  auto it = G().streams.find(h);
  if (it == G().streams.end()) return INVALID_HANDLE;
  it->second->stop = true;
  it->second->wake.notify_all();
  G().streams.erase(it);
  return OK;
}

API int cuStreamSynchronize(void* h) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  if (s->capture) { invalidate(*s); return CAPTURE_UNSUPPORTED; }
  if (int e = unsafe_call(lock)) return e;
  G().counters["stream_syncs"]++;
  wait_done(lock, s->tail);
  return s->ctx->sticky;
}

API int cuStreamQuery(void* h) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  if (s->capture) { invalidate(*s); return CAPTURE_UNSUPPORTED; }
  if (int e = unsafe_call(lock)) return e;
  return s->ctx->sticky ? s->ctx->sticky : s->tail && !s->tail->set ? NOT_READY : OK;
}

API int cuStreamWaitEvent(void* h, void* e, unsigned) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  auto it = G().events.find(e);
  if (!s || it == G().events.end()) return INVALID_HANDLE;
  Event& ev = it->second;
  if (s->capture && ev.captured != s->capture) { invalidate(*s); return CAPTURE_ISOLATION; }
  if (!s->capture && ev.captured) { s->capture = ev.captured; return OK; }
  G().counters["event_waits"]++;
  if (!ev.last) G().counters["waits_for_nothing"]++;
  return submit(lock, s, nullptr, ev.last ? std::vector<DonePtr>{ev.last} : std::vector<DonePtr>{});
}

API int cuLaunchHostFunc(void* h, void (*f)(void*), void* arg) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  G().counters["host_functions"]++;
  return submit(lock, s, [=] { f(arg); return 0; });
}

API int cuStreamGetCtx(void* h, void** out) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  *out = s->ctx;
  return OK;
}
API int cuStreamGetFlags(void* h, unsigned* out) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  *out = s->flags;
  return OK;
}
API int cuStreamGetPriority(void* h, int* out) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  *out = s->priority;
  return OK;
}

API int cuEventCreate(void** out, unsigned flags) {
  ENTER();
  Lock lock(G().mu);
  if (!current()) return INVALID_CONTEXT;
  void* h = (void*)(G().next_handle += 16);
  G().events[h] = Event{current(), flags, nullptr, nullptr};
  G().counters["events_created"]++;
  *out = h;
  return OK;
}
API int cuEventDestroy_v2(void* h) {
  ENTER();
  Lock lock(G().mu);
  return G().events.erase(h) ? OK : INVALID_HANDLE;
}
API int cuEventRecord(void* e, void* h) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  auto it = G().events.find(e);
  if (!s || it == G().events.end() || it->second.ctx != s->ctx) return INVALID_HANDLE;
  it->second.captured = s->capture;
  DonePtr done;
  int rc = submit(lock, s, nullptr, {}, &done);
  if (!rc && !s->capture) it->second.last = done;
  return rc;
}
API int cuEventRecordWithFlags(void* e, void* h, unsigned) { return cuEventRecord(e, h); }

API int cuEventQuery(void* e) {
  ENTER();
  Lock lock(G().mu);
  auto it = G().events.find(e);
  if (it == G().events.end()) return INVALID_HANDLE;
  if (it->second.captured) { it->second.captured->invalid = true; return CAPTURED_EVENT; }
  if (int rc = unsafe_call(lock)) return rc;
  if (it->second.ctx->sticky) return it->second.ctx->sticky;
  return it->second.last && !it->second.last->set ? NOT_READY : OK;
}
API int cuEventSynchronize(void* e) {
  ENTER();
  Lock lock(G().mu);
  auto it = G().events.find(e);
  if (it == G().events.end()) return INVALID_HANDLE;
  if (it->second.captured) { it->second.captured->invalid = true; return CAPTURED_EVENT; }
  if (int rc = unsafe_call(lock)) return rc;
  Ctx* ctx = it->second.ctx;
  wait_done(lock, DonePtr(it->second.last));
  return ctx->sticky;
}
API int cuEventElapsedTime(float* ms, void*, void*) { ENTER(); *ms = 0; return OK; }
API int cuEventElapsedTime_v2(float* ms, void* a, void* b) { return cuEventElapsedTime(ms, a, b); }

API int cuStreamBeginCapture_v2(void* h, int mode) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  if ((uintptr_t)h <= 2) return CAPTURE_UNSUPPORTED;
  if (s->capture) return INVALID_VALUE;
  s->capture = std::make_shared<Capture>();
  s->capture->mode = mode;
  G().captures.push_back(s->capture);
  return OK;
}
API int cuStreamIsCapturing(void* h, int* status) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  if ((uintptr_t)h <= 2) {
    for (auto& [k, o] : G().streams)
      if (o->capture && o->ctx == s->ctx && !(o->flags & 1)) return CAPTURE_IMPLICIT;
  }
  *status = !s->capture ? 0 : s->capture->invalid ? 2 : 1;
  return OK;
}
API int cuStreamEndCapture(void* h, void** graph) {
  ENTER();
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  if (!s || !s->capture) return INVALID_HANDLE;
  CapturePtr c = s->capture;
  for (auto& [k, o] : G().streams) if (o->capture == c) o->capture = nullptr;
  auto& all = G().captures;
  for (size_t i = 0; i < all.size(); i++) if (all[i] == c) { all.erase(all.begin() + i); break; }
  *graph = c->invalid ? nullptr : (void*)(G().next_handle += 16);
  return c->invalid ? CAPTURE_INVALIDATED : OK;
}
API int cuGraphDestroy(void*) { ENTER(); return OK; }
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  ENTER();
  std::swap(*mode, capture_mode_of_thread);
  return OK;
}
