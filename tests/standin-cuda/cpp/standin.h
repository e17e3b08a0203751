// A libcuda.so.1 for tests on machines without a GPU: device memory is host memory behind an allocation table, streams are
// threads with queues, kernels are the project's own sources compiled as C++.
//
// One lock (`State::mu`) guards everything but the bytes; operations of streams run outside it.
#pragma once
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))
using Ptr = unsigned long long;

enum {
  OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_PTX = 218,
  INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
  ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, LAUNCH_FAILED = 719, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, CAPTURE_IMPLICIT = 906, CAPTURED_EVENT = 907,
};

// Whether a piece of work is over; what a recorded event refers to.
struct Done { bool set = false; };
using DonePtr = std::shared_ptr<Done>;

struct Ctx { int ordinal = 0; long retained = 0; int sticky = 0; uint64_t total = 8ull << 30; uint64_t used = 0; };

struct Capture { int mode = 0; bool invalid = false; uint64_t ops = 0; };
using CapturePtr = std::shared_ptr<Capture>;

struct Event { Ctx* ctx; unsigned flags; DonePtr last; CapturePtr captured; };

struct Op { std::vector<DonePtr> after; std::function<int()> run; DonePtr done; };

struct Stream {
  Ctx* ctx = nullptr;
  unsigned flags = 0;
  int priority = 0;
  std::deque<Op> queue;
  bool held = false, stop = false;
  std::vector<DonePtr> waits_for; // other streams' work that the operation at hand waits for
  DonePtr tail;
  CapturePtr capture;
  std::condition_variable wake;
  uint64_t random = 0, executed = 0;
};
using StreamPtr = std::shared_ptr<Stream>;

struct Injection { std::string name; uint64_t nth = 0; int code = 0; std::string hit; };

struct State {
  std::mutex mu;
  std::condition_variable progress;
  bool ready = false;
  int devices = 2;
  int driver_version = 12080;
  Ctx ctx[8];
  StreamPtr legacy[8];
  std::map<void*, StreamPtr> streams;
  std::map<void*, Event> events;
  std::map<Ptr, std::pair<size_t, int>> allocations; // length, ordinal
  std::map<Ptr, size_t> registered;
  std::map<void*, std::vector<std::string>> modules;
  std::map<std::string, uint64_t> counters, calls;
  std::vector<CapturePtr> captures;
  Injection injection;
  uint64_t delay_us = 0, seed = 1, next_handle = 0x1000;
  bool hold_new = false, refuse_register = false;
};
State& G();
using Lock = std::unique_lock<std::mutex>;

// Counts the call and gives the error injected at it, or the sticky error of the calling thread's context.
int enter(const char* name);
#define ENTER() do { if (int e_ = enter(__func__)) return e_; } while (0)

Ctx* current();
StreamPtr find_stream(Lock&, void* handle);
// Queues an operation (or records it into a graph), to run after what was queued there and after `after`.
int submit(Lock&, const StreamPtr&, std::function<int()> run, std::vector<DonePtr> after = {}, DonePtr* done = nullptr);
void wait_done(Lock&, const DonePtr&);
// Whether a call that a capture in another thread may forbid is allowed; invalidates captures where it is not.
int unsafe_call(Lock&);
void invalidate(Stream&);
bool in_device(Lock&, Ptr p, size_t n);
bool in_registered(Lock&, Ptr p, size_t n);
