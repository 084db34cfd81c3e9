// Records what a process does to the files below one folder, in order. It is loaded with LD_PRELOAD.
//
// CRASH_FOLDER: the folder. CRASH_LOG: the file that records are appended to. CRASH_PAUSE_US: each sync waits for up to
// so many microseconds before it begins, so that other threads write meanwhile.
// CRASH_SKIP: syncs of files whose names end so do nothing and say that they have worked.
//
// Writes, truncations and syncs have two records, one before the call and one after it. Only what had ended when a sync
// began is covered by it. Calls that change names have one record; nothing else is recorded during such a call.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
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
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE = 1, MKDIR, LINK, RENAME, UNLINK, WRITE, TRUNCATE, ALLOCATE, SYNC, SYNC_ALL, MAP, MARK, END, UNKNOWN };

struct record {
    uint32_t kind, flags;
    uint64_t call, file;
    int64_t offset, length;
    uint32_t path_bytes, data_bytes;
};

enum { FILES = 4096, GATHERED = 1 << 30 };

static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static pthread_rwlock_t under_way = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static char folder[PATH_MAX];
static size_t folder_bytes;
static const char* skipped;
static unsigned pause_us, random_state = 1;
static int log_file = -1;
static uint64_t calls;
static struct { dev_t device; ino_t number; int skip; } files[FILES];
static int file_count;

#define REAL(name) ((__typeof__(&name))real(#name))

static void* real(const char* name) {
    void* found = dlsym(RTLD_NEXT, name);
    if (!found) {
        fprintf(stderr, "recorder: there is no %s\n", name);
        abort();
    }
    return found;
}

static void begin(void) {
    const char *place = getenv("CRASH_FOLDER"), *log = getenv("CRASH_LOG"), *pause = getenv("CRASH_PAUSE_US");
    if (!place || !log || !realpath(place, folder)) return;
    folder_bytes = strlen(folder);
    pause_us = pause ? (unsigned)atoi(pause) : 0;
    skipped = getenv("CRASH_SKIP");
    if (skipped && !*skipped) skipped = NULL;
    calls = (uint64_t)getpid() << 32;
    log_file = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int recording(void) {
    pthread_once(&once, begin);
    return log_file >= 0;
}

// One record, in one write. The caller holds `order`.
static void append(struct record* record, const char* path, const void* data) {
    record->path_bytes = path ? (uint32_t)strlen(path) : 0;
    struct iovec parts[3] = {
        {record, sizeof *record}, {(void*)path, record->path_bytes}, {(void*)data, record->data_bytes}};
    long wanted = (long)sizeof *record + record->path_bytes + record->data_bytes;
    if (syscall(SYS_writev, log_file, parts, 3) != wanted) {
        fprintf(stderr, "recorder: the log cannot be written\n");
        abort();
    }
}

static uint64_t append_alone(struct record record, const char* path, const void* data) {
    pthread_mutex_lock(&order);
    record.call = record.call ? record.call : ++calls;
    append(&record, path, data);
    pthread_mutex_unlock(&order);
    return record.call;
}

// The path of a name, with its folder resolved. Returns 0 if it is not below the folder.
static int resolve(int base, const char* path, char* out) {
    char joined[2 * PATH_MAX], parent[PATH_MAX];
    if (path[0] == '/') {
        snprintf(joined, sizeof joined, "%s", path);
    } else if (base == AT_FDCWD) {
        if (!getcwd(parent, sizeof parent)) return 0;
        snprintf(joined, sizeof joined, "%s/%s", parent, path);
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", base);
        ssize_t length = readlink(link, parent, sizeof parent - 1);
        if (length < 0) return 0;
        parent[length] = 0;
        snprintf(joined, sizeof joined, "%s/%s", parent, path);
    }
    size_t end = strlen(joined);
    while (end > 1 && joined[end - 1] == '/') joined[--end] = 0;
    char* name = strrchr(joined, '/');
    *name = 0;
    if (!realpath(*joined ? joined : "/", parent)) return 0;
    if ((size_t)snprintf(out, PATH_MAX, "%s/%s", parent, name + 1) >= PATH_MAX) return 0;
    return strncmp(out, folder, folder_bytes) == 0 && (out[folder_bytes] == '/' || out[folder_bytes] == 0);
}

// The place of an open file in `files`, or -1 if it is not below the folder.
static int known(int fd) {
    struct stat about;
    if (fd < 0 || !file_count || fstat(fd, &about)) return -1;
    for (int i = file_count - 1; i >= 0; i--)
        if (files[i].number == about.st_ino && files[i].device == about.st_dev) return i;
    return -1;
}

static void remember(const char* path, struct stat about) {
    if (file_count == FILES) {
        fprintf(stderr, "recorder: too many files\n");
        abort();
    }
    size_t length = strlen(path), end = skipped ? strlen(skipped) : 0;
    files[file_count].device = about.st_dev;
    files[file_count].number = about.st_ino;
    files[file_count].skip = skipped && length >= end && strcmp(path + length - end, skipped) == 0;
    file_count++;
}

// -- calls that change names --------------------------------------------------------------------------

static int open_in(int base, const char* path, int flags, mode_t mode) {
    if (!recording()) return (int)syscall(SYS_openat, base, path, flags, mode);
    char full[PATH_MAX];
    struct stat about;
    pthread_rwlock_rdlock(&under_way);
    pthread_mutex_lock(&order);
    int below = resolve(base, path, full);
    int there = below && fstatat(base, path, &about, 0) == 0;
    int fd = (int)syscall(SYS_openat, base, path, flags, mode), error = errno;
    if (below && fd >= 0 && fstat(fd, &about) == 0) {
        struct record record = {.kind = CREATE, .call = ++calls, .file = about.st_ino};
        int place = known(fd);
        if ((flags & O_TMPFILE) == O_TMPFILE) {
            record.kind = UNKNOWN;
            append(&record, "O_TMPFILE", NULL);
        } else if (!there) {
            append(&record, full, NULL);
        } else if ((flags & O_TRUNC) && S_ISREG(about.st_mode)) {
            record.kind = TRUNCATE;
            append(&record, NULL, NULL);
            append(&(struct record){.kind = END, .call = record.call}, NULL, NULL);
        }
        if (place < 0 || !there) remember(full, about);
    }
    pthread_mutex_unlock(&order);
    pthread_rwlock_unlock(&under_way);
    errno = error;
    return fd;
}

#define MODE(flags)                                         \
    mode_t mode = 0;                                        \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                  \
        va_list rest;                                       \
        va_start(rest, flags);                              \
        mode = va_arg(rest, mode_t);                        \
        va_end(rest);                                       \
    }

int open(const char* path, int flags, ...) {
    MODE(flags)
    return open_in(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
    MODE(flags)
    return open_in(AT_FDCWD, path, flags, mode);
}
int openat(int base, const char* path, int flags, ...) {
    MODE(flags)
    return open_in(base, path, flags, mode);
}
int openat64(int base, const char* path, int flags, ...) {
    MODE(flags)
    return open_in(base, path, flags, mode);
}

// A change of one name or two: the call and its record together.
static int change(uint32_t kind, int base, const char* path, int other_base, const char* other, long result_of[6]) {
    char full[2 * PATH_MAX + 1], second[PATH_MAX];
    struct stat about;
    pthread_rwlock_rdlock(&under_way);
    pthread_mutex_lock(&order);
    int below = resolve(base, path, full), also = other ? resolve(other_base, other, second) : below;
    int result = (int)syscall(result_of[0], result_of[1], result_of[2], result_of[3], result_of[4], result_of[5]);
    int error = errno;
    if (result == 0 && (below || also)) {
        struct record record = {.kind = kind, .flags = (uint32_t)(kind == RENAME ? result_of[5] : 0), .call = ++calls};
        const char* made = kind == LINK ? second : full;
        if ((kind == MKDIR || kind == LINK) && lstat(made, &about) == 0) {
            record.file = about.st_ino;
            if (kind == MKDIR) remember(made, about);
        }
        if (other) {
            strcat(full, "\n");
            strcat(full, second);
        }
        if (!below || !also) record.kind = UNKNOWN;
        append(&record, full, NULL);
    }
    pthread_mutex_unlock(&order);
    pthread_rwlock_unlock(&under_way);
    errno = error;
    return result;
}

#define CALL(...) (long[6]){__VA_ARGS__}

int mkdirat(int base, const char* path, mode_t mode) {
    if (!recording()) return (int)syscall(SYS_mkdirat, base, path, mode);
    return change(MKDIR, base, path, 0, NULL, CALL(SYS_mkdirat, base, (long)path, mode));
}
int mkdir(const char* path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int base, const char* path, int flags) {
    if (!recording()) return (int)syscall(SYS_unlinkat, base, path, flags);
    return change(UNLINK, base, path, 0, NULL, CALL(SYS_unlinkat, base, (long)path, flags));
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) { return unlink(path) && errno == EISDIR ? rmdir(path) : 0; }

int renameat2(int base, const char* path, int other_base, const char* other, unsigned flags) {
    if (!recording()) return (int)syscall(SYS_renameat2, base, path, other_base, other, flags);
    return change(RENAME, base, path, other_base, other,
                  CALL(SYS_renameat2, base, (long)path, other_base, (long)other, flags));
}
int renameat(int base, const char* path, int other_base, const char* other) {
    return renameat2(base, path, other_base, other, 0);
}
int rename(const char* path, const char* other) { return renameat2(AT_FDCWD, path, AT_FDCWD, other, 0); }

int linkat(int base, const char* path, int other_base, const char* other, int flags) {
    if (!recording()) return (int)syscall(SYS_linkat, base, path, other_base, other, flags);
    return change(LINK, base, path, other_base, other,
                  CALL(SYS_linkat, base, (long)path, other_base, (long)other, flags));
}
int link(const char* path, const char* other) { return linkat(AT_FDCWD, path, AT_FDCWD, other, 0); }

int symlinkat(const char* target, int base, const char* path) {
    if (!recording()) return (int)syscall(SYS_symlinkat, target, base, path);
    return change(UNKNOWN, base, path, 0, NULL, CALL(SYS_symlinkat, (long)target, base, (long)path));
}
int symlink(const char* target, const char* path) { return symlinkat(target, AT_FDCWD, path); }

// -- calls that change or keep bytes ------------------------------------------------------------------

static uint64_t start(int fd, struct record record, const void* data) {
    struct stat about;
    fstat(fd, &about);
    record.file = about.st_ino;
    return append_alone(record, NULL, data);
}

static void end(uint64_t call, long result) {
    append_alone((struct record){.kind = END, .call = call, .length = result}, NULL, NULL);
}

// Does a call between its two records. `expression` gives its result.
#define RECORDED(fd, record, data, type, expression)  \
    pthread_rwlock_rdlock(&under_way);                \
    uint64_t call = start(fd, record, data);          \
    type result = (expression);                       \
    int error = errno;                                \
    end(call, result < 0 ? -1 : (long)result);        \
    pthread_rwlock_unlock(&under_way);                \
    errno = error;                                    \
    return result;

static uint32_t sync_flags(int fd, int flags) {
    int open_flags = fcntl(fd, F_GETFL);
    return (open_flags & O_DSYNC) || (flags & (RWF_DSYNC | RWF_SYNC));
}

static int64_t position(int fd) {
    return fcntl(fd, F_GETFL) & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
}

static ssize_t write_in(int fd, const void* data, size_t count, int64_t offset, int flags, int here) {
    struct record record = {.kind = WRITE, .flags = sync_flags(fd, flags), .offset = here ? position(fd) : offset,
                            .length = (int64_t)count, .data_bytes = (uint32_t)count};
    struct iovec part = {(void*)data, count};
    RECORDED(fd, record, data, ssize_t,
             here ? REAL(write)(fd, data, count) : REAL(pwritev2)(fd, &part, 1, offset, flags))
}

ssize_t write(int fd, const void* data, size_t count) {
    if (!recording() || known(fd) < 0) return REAL(write)(fd, data, count);
    return write_in(fd, data, count, 0, 0, 1);
}
ssize_t pwrite(int fd, const void* data, size_t count, off_t offset) {
    if (!recording() || known(fd) < 0) return REAL(pwrite)(fd, data, count, offset);
    return write_in(fd, data, count, offset, 0, 0);
}
ssize_t pwrite64(int fd, const void* data, size_t count, off_t offset) { return pwrite(fd, data, count, offset); }

static ssize_t writev_in(int fd, const struct iovec* parts, int count, int64_t offset, int flags, int here) {
    size_t length = 0;
    for (int i = 0; i < count; i++) length += parts[i].iov_len;
    char* all = length < GATHERED ? malloc(length + 1) : NULL;
    if (!all) abort();
    for (size_t i = 0, at = 0; i < (size_t)count; at += parts[i++].iov_len)
        memcpy(all + at, parts[i].iov_base, parts[i].iov_len);
    struct record record = {.kind = WRITE, .flags = sync_flags(fd, flags), .offset = here ? position(fd) : offset,
                            .length = (int64_t)length, .data_bytes = (uint32_t)length};
    pthread_rwlock_rdlock(&under_way);
    uint64_t call = start(fd, record, all);
    free(all);
    ssize_t result = here ? REAL(writev)(fd, parts, count) : REAL(pwritev2)(fd, parts, count, offset, flags);
    int error = errno;
    end(call, result);
    pthread_rwlock_unlock(&under_way);
    errno = error;
    return result;
}

ssize_t writev(int fd, const struct iovec* parts, int count) {
    if (!recording() || known(fd) < 0) return REAL(writev)(fd, parts, count);
    return writev_in(fd, parts, count, 0, 0, 1);
}
ssize_t pwritev2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
    if (!recording() || known(fd) < 0) return REAL(pwritev2)(fd, parts, count, offset, flags);
    return writev_in(fd, parts, count, offset, flags, 0);
}
ssize_t pwritev(int fd, const struct iovec* parts, int count, off_t offset) {
    return pwritev2(fd, parts, count, offset, 0);
}
ssize_t pwritev64(int fd, const struct iovec* parts, int count, off_t offset) {
    return pwritev2(fd, parts, count, offset, 0);
}
ssize_t pwritev64v2(int fd, const struct iovec* parts, int count, off_t offset, int flags) {
    return pwritev2(fd, parts, count, offset, flags);
}

int ftruncate(int fd, off_t length) {
    if (!recording() || known(fd) < 0) return (int)syscall(SYS_ftruncate, fd, length);
    struct record record = {.kind = TRUNCATE, .length = length};
    RECORDED(fd, record, NULL, int, (int)syscall(SYS_ftruncate, fd, length))
}
int ftruncate64(int fd, off_t length) { return ftruncate(fd, length); }

int truncate(const char* path, off_t length) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    int result = ftruncate(fd, length), error = errno;
    close(fd);
    errno = error;
    return result;
}
int truncate64(const char* path, off_t length) { return truncate(path, length); }

int fallocate(int fd, int mode, off_t offset, off_t length) {
    if (!recording() || known(fd) < 0) return (int)syscall(SYS_fallocate, fd, mode, offset, length);
    struct record record = {.kind = ALLOCATE, .flags = (uint32_t)mode, .offset = offset, .length = length};
    RECORDED(fd, record, NULL, int, (int)syscall(SYS_fallocate, fd, mode, offset, length))
}
int fallocate64(int fd, int mode, off_t offset, off_t length) { return fallocate(fd, mode, offset, length); }

int posix_fallocate(int fd, off_t offset, off_t length) {
    int before = errno, error = fallocate(fd, 0, offset, length) ? errno : 0;
    errno = before;
    return error;
}
int posix_fallocate64(int fd, off_t offset, off_t length) { return posix_fallocate(fd, offset, length); }

static int sync_in(int fd, long number) {
    int place = recording() ? known(fd) : -1;
    if (place < 0) return (int)syscall(number, fd);
    if (files[place].skip) return 0;
    struct record record = {.kind = number == SYS_syncfs ? SYNC_ALL : SYNC};
    pthread_rwlock_rdlock(&under_way);
    uint64_t call = start(fd, record, NULL);
    if (pause_us) usleep((unsigned)rand_r(&random_state) % pause_us);
    int result = (int)syscall(number, fd), error = errno;
    end(call, result);
    pthread_rwlock_unlock(&under_way);
    errno = error;
    return result;
}

int fsync(int fd) { return sync_in(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_in(fd, SYS_fdatasync); }
int syncfs(int fd) { return sync_in(fd, SYS_syncfs); }

void sync(void) {
    if (!recording()) {
        syscall(SYS_sync);
        return;
    }
    pthread_rwlock_rdlock(&under_way);
    uint64_t call = append_alone((struct record){.kind = SYNC_ALL}, NULL, NULL);
    syscall(SYS_sync);
    end(call, 0);
    pthread_rwlock_unlock(&under_way);
}

// sync_file_range() makes nothing durable: it is not recorded.

// -- what is not known to the replay ------------------------------------------------------------------

static void note(int fd, uint32_t kind, const char* what) {
    struct stat about;
    if (recording() && known(fd) >= 0 && fstat(fd, &about) == 0)
        append_alone((struct record){.kind = kind, .file = about.st_ino}, what, NULL);
}

void* mmap(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
    if (fd >= 0 && (flags & MAP_SHARED) && (protection & PROT_WRITE)) note(fd, MAP, NULL);
    return (void*)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}
void* mmap64(void* address, size_t length, int protection, int flags, int fd, off_t offset) {
    return mmap(address, length, protection, flags, fd, offset);
}

ssize_t copy_file_range(int in, off64_t* from, int out, off64_t* to, size_t length, unsigned flags) {
    note(out, UNKNOWN, "copy_file_range");
    return syscall(SYS_copy_file_range, in, from, out, to, length, flags);
}
ssize_t sendfile(int out, int in, off_t* offset, size_t length) {
    note(out, UNKNOWN, "sendfile");
    return syscall(SYS_sendfile, out, in, offset, length);
}
ssize_t sendfile64(int out, int in, off_t* offset, size_t length) { return sendfile(out, in, offset, length); }

// -- called by the recorded program -------------------------------------------------------------------

// Puts a mark into the log.
void crash_mark(const char* data, uint32_t length) {
    if (recording()) append_alone((struct record){.kind = MARK, .data_bytes = length}, NULL, data);
}

// Ends the process as a kill does, at a moment when no recorded call is under way.
void crash_die(void) {
    pthread_rwlock_wrlock(&under_way);
    kill(getpid(), SIGKILL);
    for (;;) pause();
}
