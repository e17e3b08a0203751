/* Preloaded into a process: while the file that HOLD_READS names exists, reads of a cache's data do not come back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

ssize_t pread(int fd, void *to, size_t length, off_t at) {
    static ssize_t (*real)(int, void *, size_t, off_t);
    char link[64], path[4096];
    const char *hold = getenv("HOLD_READS");
    if (!real)
        real = (ssize_t(*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (hold && n > 7 && (path[n] = 0, !strcmp(path + n - 7, "data.kv")))
        while (!access(hold, F_OK))
            usleep(1000);
    return real(fd, to, length, at);
}
