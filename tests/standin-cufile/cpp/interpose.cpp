// For LD_PRELOAD: shows /proc/modules and the udev record of any block device to libraries that look for them, so that NVIDIA's
// libcufile runs on machines without loadable modules or udev. FOREBAY_INTERPOSE_MODULES and FOREBAY_INTERPOSE_UDEV name the files
// shown instead; what is not set is left alone.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

const char *shown(const char *path) {
    if (!path) return path;
    const char *other = nullptr;
    if (!strcmp(path, "/proc/modules")) other = getenv("FOREBAY_INTERPOSE_MODULES");
    if (!strncmp(path, "/run/udev/data/b", 16) || !strcmp(path, "/run/udev/control"))
        other = getenv("FOREBAY_INTERPOSE_UDEV");
    return other ? other : path;
}

template <typename F>
F real(const char *name) {
    return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

FILE *fopen(const char *path, const char *mode) {
    static auto f = real<FILE *(*)(const char *, const char *)>("fopen");
    return f(shown(path), mode);
}

FILE *fopen64(const char *path, const char *mode) {
    static auto f = real<FILE *(*)(const char *, const char *)>("fopen64");
    return f(shown(path), mode);
}

#define OPEN(name)                                                        \
    int name(const char *path, int flags, ...) {                          \
        va_list list;                                                     \
        va_start(list, flags);                                            \
        int mode = va_arg(list, int);                                     \
        va_end(list);                                                     \
        static auto f = real<int (*)(const char *, int, ...)>(#name);     \
        return f(shown(path), flags, mode);                               \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                            \
    int name(int dir, const char *path, int flags, ...) {                       \
        va_list list;                                                           \
        va_start(list, flags);                                                  \
        int mode = va_arg(list, int);                                           \
        va_end(list);                                                           \
        static auto f = real<int (*)(int, const char *, int, ...)>(#name);      \
        return f(dir, shown(path), flags, mode);                                \
    }
OPENAT(openat)
OPENAT(openat64)

int access(const char *path, int mode) {
    static auto f = real<int (*)(const char *, int)>("access");
    return f(shown(path), mode);
}

int faccessat(int dir, const char *path, int mode, int flags) {
    static auto f = real<int (*)(int, const char *, int, int)>("faccessat");
    return f(dir, shown(path), mode, flags);
}

int stat(const char *path, struct stat *st) {
    static auto f = real<int (*)(const char *, struct stat *)>("stat");
    return f(shown(path), st);
}

int stat64(const char *path, struct stat64 *st) {
    static auto f = real<int (*)(const char *, struct stat64 *)>("stat64");
    return f(shown(path), st);
}

int __xstat(int version, const char *path, struct stat *st) {
    static auto f = real<int (*)(int, const char *, struct stat *)>("__xstat");
    return f(version, shown(path), st);
}
}
