// A libcufile for tests: real pread and pwrite on the addresses it is given, which are plain memory also where they stand for a
// GPU's, with faults on command. It checks its caller: what would be a mistake with NVIDIA's library is an error here too, and
// counted. FOREBAY_STANDIN_CUFILE="key=value;..." sets what must hold from the first call on; the standin_* functions the rest.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Error {
    int err, cu_err;
};

struct Descr {
    int type;
    union {
        int fd;
        void *handle;
    } handle;
    const void *ops;
};

struct Handle {
    int fd;
    dev_t dev;
    ino_t ino;
};

enum Op { READ, WRITE, HANDLE_REGISTER, HANDLE_DEREGISTER, BUF_REGISTER, BUF_DEREGISTER, DRIVER_OPEN, OPS };
enum Kind { RETURN, ERRNO, SHORT, HANG, LONG };

struct Fault {
    int op;
    long after, count;
    int kind;
    long value;
};

std::mutex lock;
std::condition_variable changed;
std::vector<Fault> faults;
long counts[OPS];
long hanging, generation, misuse;
std::map<int, Handle *> handles;
std::map<uintptr_t, size_t> buffers;
uint64_t moved[2][3];
bool opened, counting;

std::string setting(const char *key) {
    const char *all = getenv("FOREBAY_STANDIN_CUFILE");
    std::string text = all ? std::string(";") + all + ";" : "", wanted = std::string(";") + key + "=";
    size_t at = text.find(wanted);
    if (at == std::string::npos) return "";
    at += wanted.size();
    return text.substr(at, text.find(';', at) - at);
}

long number(const char *key, long otherwise) {
    std::string text = setting(key);
    return text.empty() ? otherwise : atol(text.c_str());
}

// Counts a call and finds the fault it is to have.
bool fault(Op op, Fault &out) {
    std::lock_guard<std::mutex> guard(lock);
    long n = counts[op]++;
    for (Fault &f : faults) {
        if (f.op != op || n < f.after || n >= f.after + f.count) continue;
        out = f;
        return true;
    }
    return false;
}

void hang() {
    std::unique_lock<std::mutex> guard(lock);
    hanging++;
    long mine = generation;
    changed.notify_all();
    changed.wait(guard, [&] { return generation != mine; });
    hanging--;
}

Error simple(Op op, const char *key) {
    Fault f;
    bool chosen = fault(op, f);
    if (setting("crash") == key) abort();
    if ((chosen && f.kind == HANG) || setting("hang") == key) hang();
    if (chosen && f.kind == RETURN) return {static_cast<int>(f.value), 0};
    return {static_cast<int>(number(key, 0)), static_cast<int>(number("cu_err", 0))};
}

// Whether an access lies in the buffer that is registered at `base`, or has no offset where none is; anything else is the caller's
// mistake.
bool in_bounds(uintptr_t base, size_t bytes, int64_t offset) {
    std::lock_guard<std::mutex> guard(lock);
    auto found = buffers.find(base);
    if (offset < 0 || (found == buffers.end() && offset != 0) ||
        (found != buffers.end() && static_cast<size_t>(offset) + bytes > found->second)) {
        misuse++;
        return false;
    }
    return true;
}

ssize_t transfer(void *file, char *base, size_t bytes, int64_t file_offset, int64_t offset, bool write) {
    Handle *h = static_cast<Handle *>(file);
    Fault f;
    bool chosen = fault(write ? WRITE : READ, f);
    struct stat st;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto found = h ? handles.find(h->fd) : handles.end();
        if (!opened || found == handles.end() || found->second != h) {
            misuse++;
            return -5027;
        }
    }
    if (fstat(h->fd, &st) != 0 || st.st_dev != h->dev || st.st_ino != h->ino) {
        std::lock_guard<std::mutex> guard(lock);
        misuse++;
        return -5027;
    }
    if (!in_bounds(reinterpret_cast<uintptr_t>(base), bytes, offset)) return -5022;
    long given = number(write ? "write" : "read", 0);
    if (given == -1) errno = static_cast<int>(number("errno", EIO));
    if (given != 0) return given;
    if (chosen && f.kind == RETURN) return f.value;
    if (chosen && f.kind == ERRNO) {
        errno = static_cast<int>(f.value);
        return -1;
    }
    if (chosen && f.kind == HANG) hang();
    size_t whole = bytes;
    if (chosen && f.kind == SHORT) bytes = bytes > static_cast<size_t>(f.value) ? bytes - f.value : 0;
    char *at = base + offset;
    ssize_t n = write ? pwrite(h->fd, at, bytes, file_offset) : pread(h->fd, at, bytes, file_offset);
    if (n > 0 && !write && number("flip", 0)) at[n / 2] ^= 1;
    if (chosen && f.kind == LONG) return static_cast<ssize_t>(whole) + f.value;
    if (n >= 0) {
        std::string way = setting("way");
        std::lock_guard<std::mutex> guard(lock);
        if (counting) moved[write][way == "nvfs" ? 0 : way == "p2p" ? 1 : 2]++;
    }
    return n;
}

}  // namespace

extern "C" {

Error cuFileDriverOpen() {
    Error e = simple(DRIVER_OPEN, "driver_open");
    if (e.err == 0) opened = true;
    return e;
}

Error cuFileGetVersion(int *version) {
    *version = static_cast<int>(number("version", 1160));
    return {0, 0};
}

Error cuFileHandleRegister(void **handle, Descr *descr) {
    Error e = simple(HANDLE_REGISTER, "handle_register");
    if (e.err) return e;
    struct stat st;
    if (fstat(descr->handle.fd, &st) != 0) return {5022, 0};
    if (fcntl(descr->handle.fd, F_GETFL) & (O_NOFOLLOW | (O_TMPFILE & ~O_DIRECTORY))) return {5019, 0};
    if (st.st_nlink == 0) return {5031, 0};
    std::lock_guard<std::mutex> guard(lock);
    if (handles.count(descr->handle.fd)) return {5028, 0};
    Handle *h = new Handle{descr->handle.fd, st.st_dev, st.st_ino};
    handles[h->fd] = h;
    *handle = h;
    return {0, 0};
}

void cuFileHandleDeregister(void *handle) {
    Fault f;
    fault(HANDLE_DEREGISTER, f);
    Handle *h = static_cast<Handle *>(handle);
    struct stat st;
    std::lock_guard<std::mutex> guard(lock);
    auto found = h ? handles.find(h->fd) : handles.end();
    // A descriptor that was closed before is a mistake: its number may be another file's by now.
    if (found == handles.end() || found->second != h || fstat(h->fd, &st) != 0 || st.st_ino != h->ino) misuse++;
    if (found != handles.end() && found->second == h) {
        handles.erase(found);
        delete h;
    }
}

Error cuFileBufRegister(const void *base, size_t bytes, int) {
    Error e = simple(BUF_REGISTER, "buf_register");
    if (e.err) return e;
    std::lock_guard<std::mutex> guard(lock);
    if (bytes > 16u << 20) return {5016, 0};
    auto added = buffers.emplace(reinterpret_cast<uintptr_t>(base), bytes);
    return {added.second ? 0 : 5023, 0};
}

Error cuFileBufDeregister(const void *base) {
    Error e = simple(BUF_DEREGISTER, "buf_deregister");
    if (e.err) return e;
    std::lock_guard<std::mutex> guard(lock);
    if (buffers.erase(reinterpret_cast<uintptr_t>(base))) return {0, 0};
    misuse++;
    return {5024, 0};
}

ssize_t cuFileRead(void *handle, void *base, size_t bytes, int64_t file_offset, int64_t base_offset) {
    return transfer(handle, static_cast<char *>(base), bytes, file_offset, base_offset, false);
}

ssize_t cuFileWrite(void *handle, const void *base, size_t bytes, int64_t file_offset, int64_t base_offset) {
    return transfer(handle, static_cast<char *>(const_cast<void *>(base)), bytes, file_offset, base_offset, true);
}

Error cuFileSetStatsLevel(int) { return {0, 0}; }

Error cuFileStatsStart() {
    counting = true;
    return {0, 0};
}

// The layout of 1.15 to 1.18.
Error cuFileGetStatsL3(void *stats) {
    std::lock_guard<std::mutex> guard(lock);
    char *out = static_cast<char *>(stats);
    memset(out, 0, 5000);
    unsigned gpus = 1;
    memcpy(out + 1024, &gpus, sizeof gpus);
    char *gpu = out + 1032;
    const size_t at[2][3] = {{64, 56, 72}, {168, 160, 176}};
    for (int write = 0; write < 2; write++)
        for (int way = 0; way < 3; way++) memcpy(gpu + at[write][way], &moved[write][way], sizeof(uint64_t));
    return {0, 0};
}

// `count` calls of `op`, from number `after` on (0 is the next call), go wrong.
void standin_fault(int op, long after, long count, int kind, long value) {
    std::lock_guard<std::mutex> guard(lock);
    faults.push_back({op, counts[op] + after, count, kind, value});
}

void standin_clear() {
    std::lock_guard<std::mutex> guard(lock);
    faults.clear();
}

// Lets every call that hangs go on.
void standin_release() {
    std::lock_guard<std::mutex> guard(lock);
    generation++;
    changed.notify_all();
}

// Waits until so many calls hang.
void standin_wait_hanging(long n) {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return hanging >= n; });
}

long standin_count(int op) {
    std::lock_guard<std::mutex> guard(lock);
    return counts[op];
}

long standin_handles() {
    std::lock_guard<std::mutex> guard(lock);
    return static_cast<long>(handles.size());
}

long standin_buffers() {
    std::lock_guard<std::mutex> guard(lock);
    return static_cast<long>(buffers.size());
}

long standin_misuse() {
    std::lock_guard<std::mutex> guard(lock);
    return misuse;
}
}
