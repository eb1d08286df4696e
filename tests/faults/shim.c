/* Traces the system calls that a program makes on files below one folder, and injects a fault at a
 * chosen call: it fails, writes too little, or is the last one before SIGKILL.
 *
 * Loaded with LD_PRELOAD. FAULT_ROOT is the folder. FAULT_CONTROL is a file that the test maps too;
 * its layout is `struct control`, which shim.py repeats. FAULT_TRACE is the file to append to. A call
 * is identified by its kind, its path below the folder, and the number of such calls before it, so
 * that the same call is found again whatever the threads do.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <linux/openat2.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAIL_ONCE = 1, FAIL_FROM_HERE = 2, KILL_AFTER = 3, SHORT_WRITE = 4, KILL_BEFORE = 5 };
enum { IDLE = 0, ARMED = 1, FIRED = 2 };

struct control {
    int32_t state, action, error, nth;
    int32_t is_tracing, unused;
    char op[24];
    char pattern[1000];
};

struct call {
    const char *op;
    char path[PATH_MAX], other[PATH_MAX];
    int is_ours, only_reads;
    off_t offset;
    const void *data;
    size_t size;
};

static struct control *control;
static char root[PATH_MAX];
static int trace = -1;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void begin(void) {
    const char *folder = getenv("FAULT_ROOT"), *path = getenv("FAULT_CONTROL");
    const char *log = getenv("FAULT_TRACE");
    if (!folder || !path || !log || !realpath(folder, root)) return;
    int handle = open(path, O_RDWR | O_CLOEXEC);
    if (handle < 0) return;
    trace = open(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    close(handle);
    if (mapped != MAP_FAILED) control = mapped;
}

static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

/* Convert `path`, relative to the descriptor `at`, to a path below the folder, in `into`. */
static int below_root(int at, const char *path, char *into) {
    static const char held[] = "/proc/self/fd/";
    char whole[2 * PATH_MAX + 2], link[64], base[PATH_MAX];
    /* A folder that the program has open and refers to by its descriptor. */
    if (path && !strncmp(path, held, sizeof held - 1)) {
        char *rest;
        at = (int)strtol(path + sizeof held - 1, &rest, 10);
        path = *rest == '/' ? rest + 1 : NULL;
    }
    if (path && path[0] == '/') {
        snprintf(whole, sizeof whole, "%s", path);
    } else if (at == AT_FDCWD) {
        return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
        snprintf(whole, sizeof whole, path ? "%s/%s" : "%s", base, path);
    }
    size_t head = strlen(root);
    if (strncmp(whole, root, head) || (whole[head] && whole[head] != '/')) return 0;
    snprintf(into, PATH_MAX, "%s", whole[head] ? whole + head + 1 : ".");
    return 1;
}

static struct call named(const char *op, int at, const char *path) {
    struct call call = {.op = op, .offset = -1};
    call.is_ours = control && below_root(at, path, call.path);
    return call;
}

/* True if the armed action applies to this call. */
static int is_meant(struct call *call) {
    if (!call->is_ours) return 0;
    if (control->state == FIRED)
        return control->action == FAIL_FROM_HERE && !call->only_reads && strcmp(call->op, "unlink");
    if (control->state != ARMED || strcmp(control->op, call->op)) return 0;
    if (fnmatch(control->pattern, call->path, 0)) return 0;
    if (__atomic_fetch_sub(&control->nth, 1, __ATOMIC_SEQ_CST) != 1) return 0;
    control->state = FIRED;
    return 1;
}

static void note(struct call *call, long result, int error) {
    static const char digits[] = "0123456789abcdef";
    char head[2 * PATH_MAX + 200];
    int length = snprintf(head, sizeof head, "%s\t%s\t%s\t%ld\t%d\t%lld\t%d\t", call->op, call->path,
                          call->other, result, error, (long long)call->offset, call->only_reads);
    size_t data = call->data && result > 0 ? (size_t)result : 0;
    char *line = malloc(length + 2 * data + 1);
    if (!line) abort();
    memcpy(line, head, length);
    for (size_t i = 0; i < data; i++) {
        unsigned char byte = ((const unsigned char *)call->data)[i];
        line[length + 2 * i] = digits[byte >> 4];
        line[length + 2 * i + 1] = digits[byte & 15];
    }
    line[length + 2 * data] = '\n';
    ssize_t (*put)(int, const void *, size_t) = real("write");
    if (put(trace, line, length + 2 * data + 1) < 0) abort();
    free(line);
}

/* Handle one call: `ACT` is the real call, `SHORT` the same with half of its bytes. */
#define RUN(TYPE, CALL, ACT, SHORT)                                             \
    do {                                                                        \
        struct call *call_ = &(CALL);                                           \
        int is_traced_ = call_->is_ours && control->is_tracing;                 \
        if (is_traced_) pthread_mutex_lock(&order);                             \
        int meant_ = is_meant(call_), action_ = meant_ ? control->action : 0;   \
        TYPE result_;                                                           \
        if (action_ == KILL_BEFORE) kill(getpid(), SIGKILL);                    \
        if (action_ == FAIL_ONCE || action_ == FAIL_FROM_HERE) {                \
            errno = control->error;                                             \
            result_ = -1;                                                       \
        } else if (action_ == SHORT_WRITE) {                                    \
            result_ = (SHORT);                                                  \
        } else {                                                                \
            result_ = (ACT);                                                    \
        }                                                                       \
        int error_ = errno;                                                     \
        if (is_traced_) {                                                       \
            note(call_, (long)result_, result_ < 0 ? error_ : 0);               \
            pthread_mutex_unlock(&order);                                       \
        }                                                                       \
        if (action_ == KILL_AFTER) {                                            \
            kill(getpid(), SIGKILL);                                            \
            pause();                                                            \
        }                                                                       \
        errno = error_;                                                         \
        return result_;                                                         \
    } while (0)

#define WRITER(NAME, OFFSET_TYPE, PARAMETERS, ARGUMENTS, HALF, WHERE)           \
    ssize_t NAME PARAMETERS {                                                   \
        ssize_t(*next) PARAMETERS = real(#NAME);                                \
        struct call call = named("write", handle, NULL);                        \
        call.data = bytes, call.size = size, call.offset = (WHERE);             \
        RUN(ssize_t, call, next ARGUMENTS, next HALF);                          \
    }

WRITER(write, void, (int handle, const void *bytes, size_t size), (handle, bytes, size),
       (handle, bytes, (size + 1) / 2), call.is_ours ? lseek(handle, 0, SEEK_CUR) : 0)
WRITER(pwrite, off_t, (int handle, const void *bytes, size_t size, off_t at),
       (handle, bytes, size, at), (handle, bytes, (size + 1) / 2, at), at)
WRITER(pwrite64, off_t, (int handle, const void *bytes, size_t size, off_t at),
       (handle, bytes, size, at), (handle, bytes, (size + 1) / 2, at), at)

/* Unused ways to write: they are traced only to detect that the shim does not cover a call. */
#define UNEXPECTED(TYPE, NAME, PARAMETERS, ARGUMENTS, HANDLE)                   \
    TYPE NAME PARAMETERS {                                                      \
        TYPE(*next) PARAMETERS = real(#NAME);                                   \
        struct call call = named("unexpected " #NAME, HANDLE, NULL);            \
        RUN(TYPE, call, next ARGUMENTS, next ARGUMENTS);                        \
    }

UNEXPECTED(ssize_t, writev, (int h, const struct iovec *v, int n), (h, v, n), h)
UNEXPECTED(ssize_t, pwritev, (int h, const struct iovec *v, int n, off_t o), (h, v, n, o), h)
UNEXPECTED(ssize_t, pwritev64, (int h, const struct iovec *v, int n, off_t o), (h, v, n, o), h)
UNEXPECTED(ssize_t, sendfile, (int h, int f, off_t *o, size_t n), (h, f, o, n), h)
UNEXPECTED(ssize_t, sendfile64, (int h, int f, off_t *o, size_t n), (h, f, o, n), h)
UNEXPECTED(ssize_t, copy_file_range, (int f, off_t *a, int h, off_t *b, size_t n, unsigned g),
           (f, a, h, b, n, g), h)
UNEXPECTED(int, ftruncate, (int h, off_t n), (h, n), h)
UNEXPECTED(int, ftruncate64, (int h, off_t n), (h, n), h)
UNEXPECTED(int, fallocate, (int h, int m, off_t a, off_t b), (h, m, a, b), h)
UNEXPECTED(int, fallocate64, (int h, int m, off_t a, off_t b), (h, m, a, b), h)

#define SYNC(NAME)                                                              \
    int NAME(int handle) {                                                      \
        int (*next)(int) = real(#NAME);                                         \
        struct call call = named("fsync", handle, NULL);                        \
        RUN(int, call, next(handle), next(handle));                             \
    }

SYNC(fsync)
SYNC(fdatasync)

static int only_reads(int flags) { return (flags & (O_ACCMODE | O_CREAT | O_TRUNC)) == O_RDONLY; }

#define OPENER(NAME)                                                            \
    int NAME(const char *path, int flags, ...) {                                \
        int (*next)(const char *, int, ...) = real(#NAME);                      \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;       \
        va_end(rest);                                                           \
        struct call call = named("open", AT_FDCWD, path);                       \
        call.only_reads = only_reads(flags);                                    \
        RUN(int, call, next(path, flags, mode), next(path, flags, mode));       \
    }

#define OPENER_AT(NAME)                                                         \
    int NAME(int at, const char *path, int flags, ...) {                        \
        int (*next)(int, const char *, int, ...) = real(#NAME);                 \
        va_list rest;                                                           \
        va_start(rest, flags);                                                  \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, int) : 0;       \
        va_end(rest);                                                           \
        struct call call = named("open", at, path);                             \
        call.only_reads = only_reads(flags);                                    \
        RUN(int, call, next(at, path, flags, mode), next(at, path, flags, mode)); \
    }

OPENER(open)
OPENER(open64)
OPENER_AT(openat)
OPENER_AT(openat64)

/* openat2, for which libc has no function; every other call by `syscall` is passed through. */
long syscall(long number, ...) {
    long (*next)(long, ...) = real("syscall");
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (number != SYS_openat2) return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
    const struct open_how *how = (const struct open_how *)a[2];
    struct call call = named("open", (int)a[0], (const char *)a[1]);
    call.only_reads = only_reads((int)how->flags);
    RUN(long, call, next(number, a[0], a[1], a[2], a[3]), next(number, a[0], a[1], a[2], a[3]));
}

#define ONE_PATH(NAME, OP, PARAMETERS, ARGUMENTS, AT)                           \
    int NAME PARAMETERS {                                                       \
        int(*next) PARAMETERS = real(#NAME);                                    \
        struct call call = named(OP, AT, path);                                 \
        RUN(int, call, next ARGUMENTS, next ARGUMENTS);                         \
    }

ONE_PATH(mkdir, "mkdir", (const char *path, mode_t mode), (path, mode), AT_FDCWD)
ONE_PATH(mkdirat, "mkdir", (int at, const char *path, mode_t mode), (at, path, mode), at)
ONE_PATH(unlink, "unlink", (const char *path), (path), AT_FDCWD)
ONE_PATH(unlinkat, "unlink", (int at, const char *path, int flags), (at, path, flags), at)
ONE_PATH(rmdir, "unlink", (const char *path), (path), AT_FDCWD)

/* Calls on two names are identified by the new name. */
#define TWO_PATHS(NAME, OP, PARAMETERS, ARGUMENTS, FROM_AT, TO_AT)              \
    int NAME PARAMETERS {                                                       \
        int(*next) PARAMETERS = real(#NAME);                                    \
        struct call call = named(OP, TO_AT, to);                                \
        if (call.is_ours && (strcmp(OP, "symlink") == 0 ||                      \
                             !below_root(FROM_AT, from, call.other)))           \
            snprintf(call.other, sizeof call.other, "%s", from);                \
        RUN(int, call, next ARGUMENTS, next ARGUMENTS);                         \
    }

TWO_PATHS(rename, "rename", (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
TWO_PATHS(renameat, "rename", (int a, const char *from, int b, const char *to), (a, from, b, to), a, b)
TWO_PATHS(renameat2, "rename", (int a, const char *from, int b, const char *to, unsigned flags),
          (a, from, b, to, flags), a, b)
TWO_PATHS(link, "link", (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
TWO_PATHS(linkat, "link", (int a, const char *from, int b, const char *to, int flags),
          (a, from, b, to, flags), a, b)
TWO_PATHS(symlink, "symlink", (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD)
TWO_PATHS(symlinkat, "symlink", (const char *from, int b, const char *to), (from, b, to), b, b)
