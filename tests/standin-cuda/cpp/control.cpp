// Functions by which tests control the stand-in and look into it.
#include "standin.h"

static bool all_set(const std::vector<DonePtr>& v) { for (auto& d : v) if (!d->set) return false; return true; }

static uint64_t number(Lock&, const std::string& key) {
  State& g = G();
  if (key == "live_allocations") return g.allocations.size();
  if (key == "live_events") return g.events.size();
  if (key == "live_streams") return g.streams.size();
  if (key == "live_registered") return g.registered.size();
  if (key == "retained") { uint64_t n = 0; for (auto& c : g.ctx) n += c.retained; return n; }
  if (key == "pending") { uint64_t n = 0; for (auto& [h, s] : g.streams) n += s->tail && !s->tail->set; return n; }
  if (key == "used_bytes") { uint64_t n = 0; for (auto& c : g.ctx) n += c.used; return n; }
  if (key.rfind("cu", 0) == 0) return g.calls[key];
  return g.counters[key];
}
API uint64_t standin_get(const char* key) { Lock lock(G().mu); return number(lock, key); }

API void standin_set(const char* key, uint64_t a, uint64_t b) {
  Lock lock(G().mu);
  State& g = G();
  std::string k = key;
  if (k == "memory") g.ctx[a].total = b;
  else if (k == "delays") { g.seed = a | 1; g.delay_us = b; }
  else if (k == "forget") {
    for (auto& [h, s] : g.streams) { s->stop = true; s->wake.notify_all(); }
    g.streams.clear(); g.events.clear(); g.allocations.clear(); g.registered.clear();
    g.counters["live_modules"] = 0;
    for (auto& c : g.ctx) c.used = c.retained = 0;
  }
  else if (k == "heal") { for (auto& c : g.ctx) c.sticky = 0; }
  else if (k == "refuse_register") g.refuse_register = a;
  else if (k == "counter") {
    for (auto& [name, value] : g.counters) if (name.rfind("live_", 0)) value = 0;
  }
}

// Inject `code` at the nth call from now of the function, or of any where the name is empty.
API void standin_inject(const char* name, uint64_t nth, int code) {
  Lock lock(G().mu);
  G().injection = Injection{name, nth, code, ""};
}
// Copies the name of the function that the injected error hit; empty where it did not.
API void standin_hit(char* out, size_t len) {
  Lock lock(G().mu);
  strncpy(out, G().injection.hit.c_str(), len - 1);
  out[len - 1] = 0;
}

// Stops a stream, or lets it go on; with handle ~0 all streams that do not block the legacy stream,
// also those made later.
API int standin_hold(void* h, int on) {
  Lock lock(G().mu);
  auto set = [&](const StreamPtr& s) { s->held = on; s->wake.notify_all(); };
  if (h == (void*)~0ull) {
    G().hold_new = on;
    for (auto& [k, s] : G().streams) if (s->flags & 1) set(s);
    return OK;
  }
  auto s = find_stream(lock, h);
  if (!s) return INVALID_HANDLE;
  set(s);
  return OK;
}
// Waits until all streams that are not held have done what they can, given that nobody submits more.
API void standin_settle() {
  Lock lock(G().mu);
  auto idle = [&] {
    for (auto& [h, s] : G().streams) {
      if (!s->tail || s->tail->set || s->held || !all_set(s->waits_for)) continue;
      return false;
    }
    return true;
  };
  G().progress.wait(lock, idle);
}
API uint64_t standin_streams(void** handles, int* flags, int* priorities, uint64_t max) {
  Lock lock(G().mu);
  uint64_t n = 0;
  for (auto& [h, s] : G().streams) {
    if (n == max) break;
    handles[n] = h; flags[n] = s->flags; priorities[n] = s->priority;
    n++;
  }
  return n;
}
API uint64_t standin_executed(void* h) {
  Lock lock(G().mu);
  auto s = find_stream(lock, h);
  return s ? s->executed : 0;
}
// Whether the bytes are device memory; raw access for tests that play the server.
API int standin_is_device(Ptr p, size_t n) { Lock lock(G().mu); return in_device(lock, p, n); }
