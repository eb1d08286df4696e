/* Shifts the wall clock of a process by an amount that may change while it runs.
 *
 * Loaded with LD_PRELOAD. CLOCK_SHIFT names a file with the shift in nanoseconds, an int64_t, which is
 * mapped. Clocks that nobody can set, such as CLOCK_MONOTONIC and CLOCK_BOOTTIME, stay as they are.
 * A deadline by the wall clock is shifted back before it reaches the kernel. Deadlines by other clocks
 * are recognised by their size: no machine has been up since before 2001.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define SECOND 1000000000LL

static const volatile int64_t *shift;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("CLOCK_SHIFT");
    int handle = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (handle < 0) return;
    void *mapped = mmap(NULL, sizeof *shift, PROT_READ, MAP_SHARED, handle, 0);
    if (mapped != MAP_FAILED) shift = mapped;
    close(handle);
}

static void *next(const char *name, const char *version) {
    void *found = version ? dlvsym(RTLD_NEXT, name, version) : NULL;
    return found ? found : dlsym(RTLD_NEXT, name);
}

/* The first lookup of each function is the same in all threads. */
#define REAL(result, name, version, ...)                                       \
    static result (*real)(__VA_ARGS__);                                        \
    if (!real) real = (result(*)(__VA_ARGS__))next(#name, version)

static struct timespec moved(const struct timespec *time, int64_t by) {
    int64_t nanoseconds = time->tv_nsec + by % SECOND;
    struct timespec result = {time->tv_sec + by / SECOND, nanoseconds};
    if (nanoseconds >= SECOND) result.tv_sec++, result.tv_nsec -= SECOND;
    if (nanoseconds < 0) result.tv_sec--, result.tv_nsec += SECOND;
    return result;
}

static struct timespec real_deadline(const struct timespec *time) {
    int is_wall = time->tv_sec > SECOND;
    return moved(time, is_wall && shift ? -*shift : 0);
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    REAL(int, clock_gettime, NULL, clockid_t, struct timespec *);
    int result = real(clock, time);
    if (result == 0 && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        *time = moved(time, *shift);
    return result;
}

int gettimeofday(struct timeval *time, void *zone) {
    (void)zone;
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now)) return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* x86-64 has an older version of the first one, with which waits would fail. */
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *at) {
    REAL(int, pthread_cond_timedwait, "GLIBC_2.3.2", pthread_cond_t *, pthread_mutex_t *,
         const struct timespec *);
    struct timespec deadline = real_deadline(at);
    return real(cond, mutex, &deadline);
}

int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock,
                           const struct timespec *at) {
    REAL(int, pthread_cond_clockwait, NULL, pthread_cond_t *, pthread_mutex_t *, clockid_t,
         const struct timespec *);
    struct timespec deadline = real_deadline(at);
    return real(cond, mutex, clock, &deadline);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *at) {
    REAL(int, pthread_mutex_timedlock, NULL, pthread_mutex_t *, const struct timespec *);
    struct timespec deadline = real_deadline(at);
    return real(mutex, &deadline);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *at) {
    REAL(int, sem_timedwait, NULL, sem_t *, const struct timespec *);
    struct timespec deadline = real_deadline(at);
    return real(semaphore, &deadline);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *at) {
    REAL(int, sem_clockwait, NULL, sem_t *, clockid_t, const struct timespec *);
    struct timespec deadline = real_deadline(at);
    return real(semaphore, clock, &deadline);
}
