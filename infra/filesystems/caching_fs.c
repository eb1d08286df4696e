/* A pass-through FUSE file system that behaves like a slow or stale network file system.
 *
 *     caching_fs SOURCE CONTROL MOUNT_POINT [-f] [-o attr_timeout=60,entry_timeout=60,...]
 *
 * It shows SOURCE at MOUNT_POINT. The FUSE options `attr_timeout`, `entry_timeout` and
 * `negative_timeout` say for how many seconds the kernel believes attributes, names and absences,
 * as the clients of network file systems do. Each mount has caches of its own, so two mounts of the
 * same SOURCE behave like two hosts.
 *
 * CONTROL is a file outside of the mount. Each operation reads it, so faults can begin and end while
 * processes run. It has one line: `LATENCY_MS ERROR PATTERN`. LATENCY_MS delays an operation, and
 * `stall` holds it until the line changes. ERROR is `none`, `EIO`, `ESTALE`, `ENOSPC` or `ENOLINK`,
 * the last for a file system without hard links. PATTERN selects the paths that contain it; `*`
 * selects all of them.
 *
 * If the environment names a file in CACHING_FS_COUNTS, it gets two 64-bit numbers: how many
 * operations on metadata and on data have reached this file system. With CACHING_FS_LOCKS=local, a
 * file lock holds in this mount only, as on file systems without locks between hosts.
 */
#define FUSE_USE_VERSION 35
#define _GNU_SOURCE

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define WORD_MAX 255
#define POLL_NS 20000000L

static int source;
static const char *control;

enum kind { METADATA, DATA, KINDS };
static _Atomic uint64_t uncounted[KINDS];
static _Atomic uint64_t *counts = uncounted;

struct fault {
    char latency[WORD_MAX + 1];
    char error[WORD_MAX + 1];
    char pattern[WORD_MAX + 1];
};

/* Return the path below SOURCE: FUSE's paths begin with a slash. */
static const char *below(const char *path)
{
    return path[1] ? path + 1 : ".";
}

static int read_fault(struct fault *now)
{
    char line[3 * WORD_MAX + 4] = {0};
    int handle = open(control, O_RDONLY | O_CLOEXEC);
    if (handle < 0)
        return 0;
    ssize_t length = read(handle, line, sizeof line - 1);
    close(handle);
    return length > 0
           && sscanf(line, "%255s %255s %255s", now->latency, now->error, now->pattern) == 3;
}

static void pause_ns(long seconds, long nanoseconds)
{
    struct timespec left = {seconds, nanoseconds};
    while (nanosleep(&left, &left) < 0 && errno == EINTR)
        ;
}

/* Apply the present fault to an operation on `path`. Return 0, or the negative errno. */
static int meet(const char *path, enum kind kind)
{
    struct fault now;
    atomic_fetch_add(&counts[kind], 1);
    while (read_fault(&now) && (now.pattern[0] == '*' || strstr(path, now.pattern))) {
        if (!strcmp(now.latency, "stall")) {
            pause_ns(0, POLL_NS);
            continue;
        }
        long ms = strtol(now.latency, NULL, 10);
        if (ms > 0)
            pause_ns(ms / 1000, ms % 1000 * 1000000L);
        if (!strcmp(now.error, "EIO"))
            return -EIO;
        if (!strcmp(now.error, "ESTALE"))
            return -ESTALE;
        if (!strcmp(now.error, "ENOSPC"))
            return -ENOSPC;
        return 0;
    }
    return 0;
}

static int has_no_links(const char *path)
{
    struct fault now;
    return read_fault(&now) && !strcmp(now.error, "ENOLINK")
           && (now.pattern[0] == '*' || strstr(path, now.pattern));
}

static int answer(long result)
{
    return result < 0 ? -errno : (int)result;
}

#define MEET_AS(path, kind)             \
    do {                                \
        int problem = meet(path, kind); \
        if (problem)                    \
            return problem;             \
    } while (0)
#define MEET(path) MEET_AS(path, METADATA)

static int fs_getattr(const char *path, struct stat *found, struct fuse_file_info *info)
{
    MEET(path);
    if (info)
        return answer(fstat((int)info->fh, found));
    return answer(fstatat(source, below(path), found, AT_SYMLINK_NOFOLLOW));
}

static int fs_readlink(const char *path, char *target, size_t size)
{
    MEET(path);
    ssize_t length = readlinkat(source, below(path), target, size - 1);
    if (length < 0)
        return -errno;
    target[length] = '\0';
    return 0;
}

static int fs_mknod(const char *path, mode_t mode, dev_t device)
{
    MEET(path);
    return answer(mknodat(source, below(path), mode, device));
}

static int fs_mkdir(const char *path, mode_t mode)
{
    MEET(path);
    return answer(mkdirat(source, below(path), mode));
}

static int fs_unlink(const char *path)
{
    MEET(path);
    return answer(unlinkat(source, below(path), 0));
}

static int fs_rmdir(const char *path)
{
    MEET(path);
    return answer(unlinkat(source, below(path), AT_REMOVEDIR));
}

static int fs_symlink(const char *target, const char *path)
{
    MEET(path);
    return answer(symlinkat(target, source, below(path)));
}

static int fs_rename(const char *from, const char *to, unsigned flags)
{
    MEET(to);
    return answer(renameat2(source, below(from), source, below(to), flags));
}

static int fs_link(const char *from, const char *to)
{
    MEET(to);
    if (has_no_links(to))
        return -EPERM;
    return answer(linkat(source, below(from), source, below(to), 0));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *info)
{
    MEET(path);
    if (info)
        return answer(fchmod((int)info->fh, mode));
    return answer(fchmodat(source, below(path), mode, 0));
}

static int fs_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *info)
{
    MEET(path);
    if (info)
        return answer(fchown((int)info->fh, user, group));
    return answer(fchownat(source, below(path), user, group, AT_SYMLINK_NOFOLLOW));
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *info)
{
    MEET(path);
    if (info)
        return answer(ftruncate((int)info->fh, size));
    int handle = openat(source, below(path), O_WRONLY | O_CLOEXEC);
    if (handle < 0)
        return -errno;
    int result = answer(ftruncate(handle, size));
    close(handle);
    return result;
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info)
{
    MEET(path);
    if (info)
        return answer(futimens((int)info->fh, times));
    return answer(utimensat(source, below(path), times, AT_SYMLINK_NOFOLLOW));
}

static int open_here(const char *path, int flags, mode_t mode, struct fuse_file_info *info)
{
    MEET(path);
    int handle = openat(source, below(path), flags | O_CLOEXEC, mode);
    if (handle < 0)
        return -errno;
    info->fh = (uint64_t)handle;
    info->direct_io = !!(flags & O_DIRECT);
    return 0;
}

static int fs_open(const char *path, struct fuse_file_info *info)
{
    /* The buffers that FUSE hands over are not aligned. */
    int flags = info->flags & ~O_DIRECT;
    int result = open_here(path, flags, 0, info);
    info->direct_io = !!(info->flags & O_DIRECT);
    return result;
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *info)
{
    return open_here(path, (info->flags & ~O_DIRECT) | O_CREAT, mode, info);
}

static int fs_read(const char *path, char *data, size_t size, off_t at, struct fuse_file_info *info)
{
    MEET_AS(path, DATA);
    return answer(pread((int)info->fh, data, size, at));
}

static int fs_write(const char *path, const char *data, size_t size, off_t at,
                    struct fuse_file_info *info)
{
    MEET_AS(path, DATA);
    return answer(pwrite((int)info->fh, data, size, at));
}

static int fs_statfs(const char *path, struct statvfs *found)
{
    MEET(path);
    return answer(fstatvfs(source, found));
}

static int fs_release(const char *path, struct fuse_file_info *info)
{
    (void)path;
    return answer(close((int)info->fh));
}

static int fs_fsync(const char *path, int only_data, struct fuse_file_info *info)
{
    MEET_AS(path, DATA);
    return answer(only_data ? fdatasync((int)info->fh) : fsync((int)info->fh));
}

static int fs_opendir(const char *path, struct fuse_file_info *info)
{
    MEET(path);
    int handle = openat(source, below(path), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (handle < 0)
        return -errno;
    info->fh = (uint64_t)handle;
    return 0;
}

static int fs_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t at,
                      struct fuse_file_info *info, enum fuse_readdir_flags flags)
{
    (void)at;
    (void)flags;
    MEET(path);
    int handle = openat((int)info->fh, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *folder = handle < 0 ? NULL : fdopendir(handle);
    if (!folder)
        return -errno;
    struct dirent *entry;
    while ((entry = readdir(folder))) {
        struct stat found = {0};
        found.st_ino = entry->d_ino;
        found.st_mode = (mode_t)DTTOIF(entry->d_type);
        fill(buffer, entry->d_name, &found, 0, 0);
    }
    closedir(folder);
    return 0;
}

static int fs_fsyncdir(const char *path, int only_data, struct fuse_file_info *info)
{
    return fs_fsync(path, only_data, info);
}

static int fs_fallocate(const char *path, int mode, off_t at, off_t size, struct fuse_file_info *info)
{
    MEET_AS(path, DATA);
    return answer(fallocate((int)info->fh, mode, at, size));
}

static int fs_flock(const char *path, struct fuse_file_info *info, int kind)
{
    MEET(path);
    return answer(flock((int)info->fh, kind));
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config)
{
    (void)connection;
    config->use_ino = 1;
    config->readdir_ino = 1;
    return NULL;
}

static struct fuse_operations operations = {
    .init = fs_init,
    .getattr = fs_getattr,
    .readlink = fs_readlink,
    .mknod = fs_mknod,
    .mkdir = fs_mkdir,
    .unlink = fs_unlink,
    .rmdir = fs_rmdir,
    .symlink = fs_symlink,
    .rename = fs_rename,
    .link = fs_link,
    .chmod = fs_chmod,
    .chown = fs_chown,
    .truncate = fs_truncate,
    .utimens = fs_utimens,
    .open = fs_open,
    .create = fs_create,
    .read = fs_read,
    .write = fs_write,
    .statfs = fs_statfs,
    .release = fs_release,
    .fsync = fs_fsync,
    .opendir = fs_opendir,
    .releasedir = fs_release,
    .readdir = fs_readdir,
    .fsyncdir = fs_fsyncdir,
    .fallocate = fs_fallocate,
    .flock = fs_flock,
};

int main(int count, char *words[])
{
    if (count < 4) {
        fprintf(stderr, "usage: %s SOURCE CONTROL MOUNT_POINT [FUSE options]\n", words[0]);
        return 2;
    }
    source = open(words[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    control = words[2];
    if (source < 0 || control[0] != '/') {
        fprintf(stderr, "%s: SOURCE must be a folder and CONTROL an absolute path\n", words[0]);
        return 2;
    }
    const char *place = getenv("CACHING_FS_COUNTS");
    int handle = place ? open(place, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (handle >= 0 && ftruncate(handle, sizeof uncounted) == 0) {
        void *shared = mmap(NULL, sizeof uncounted, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
        if (shared != MAP_FAILED)
            counts = shared;
    }
    const char *locks = getenv("CACHING_FS_LOCKS");
    if (locks && !strcmp(locks, "local"))
        operations.flock = NULL;
    umask(0);
    /* FUSE parses the program's name, the mount point and the options. */
    words[2] = words[0];
    return fuse_main(count - 2, words + 2, &operations, NULL);
}
