/* Makes the n-th call that changes files below a folder fail. Preloaded into the process that saves.

   gcc -shared -fPIC -o shim.so shim.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char folder[PATH_MAX];
static volatile long left = -1; /* calls until the one that fails; -1: count only */
static volatile long seen = 0;
static int error_number = 0; /* 0: write half of it */
static volatile int failed = 0;

void chaos_arm(const char *path, long n, int error) {
    snprintf(folder, sizeof folder, "%s", path);
    left = n, error_number = error, seen = 0, failed = 0;
}

void chaos_disarm(void) { folder[0] = 0; }
long chaos_seen(void) { return seen; }
int chaos_failed(void) { return failed; }

static int below(const char *path) { return folder[0] && path && strncmp(path, folder, strlen(folder)) == 0; }

static int fd_below(int fd) {
    char name[64], path[PATH_MAX];
    if (!folder[0]) return 0;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(name, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return below(path);
}

/* 1 if this call is the one */
static int now(void) {
    long number = __sync_add_and_fetch(&seen, 1);
    if (left < 0 || number != left) return 0;
    failed = 1;
    errno = error_number;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

ssize_t write(int fd, const void *data, size_t size) {
    if (fd_below(fd) && now()) return error_number || size < 2 ? (errno = error_number ? error_number : EINTR, -1) : NEXT(write)(fd, data, size / 2);
    return NEXT(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    if (fd_below(fd) && now() && error_number) return -1;
    return NEXT(writev)(fd, parts, count);
}
int fsync(int fd) { return fd_below(fd) && now() && error_number ? -1 : NEXT(fsync)(fd); }
int fdatasync(int fd) { return fd_below(fd) && now() && error_number ? -1 : NEXT(fdatasync)(fd); }
int rename(const char *from, const char *to) { return below(to) && now() && error_number ? -1 : NEXT(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) { return below(to) && now() && error_number ? -1 : NEXT(renameat)(a, from, b, to); }
int mkdir(const char *path, mode_t mode) { return below(path) && now() && error_number ? -1 : NEXT(mkdir)(path, mode); }

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        va_list rest;                                                          \
        va_start(rest, flags);                                                 \
        mode_t mode = va_arg(rest, mode_t);                                    \
        va_end(rest);                                                          \
        if ((flags & O_CREAT) && below(path) && now() && error_number) return -1; \
        return NEXT(name)(path, flags, mode);                                  \
    }
OPEN(open)
OPEN(open64)
