/* Threads that move bytes between files and memory: each piece of a job is read from a file, or copied from memory, to
 * its place, or written from there to a file. The data loader brings rows together with them; scratch files move blocks.
 *
 * A job is an array of pieces. Threads take the pieces of the oldest job in runs of about CHUNK bytes, so that one
 * batch is put together by all of them, and go on with the next job when nothing of it is left to take. Pieces that
 * continue each other on both sides are moved as one: rows in file order become a few large reads. The thread that took
 * them joins them; handing a job over costs only a look at each piece: the caller has more urgent work.
 *
 * A piece goes on after EINTR and after a short count until `needed` bytes are moved: a direct read is rounded up to whole
 * sectors, which may lie behind the end of the file. It goes on at a multiple of the job's unit, and moves a few bytes
 * twice: direct I/O takes no other offset. A call that gets no further is a stall. The end of a file is one for ever, and
 * some look like one for a moment, so stalls are counted. The first piece that fails ends its job, with what was moved of
 * it; pieces of the job that no thread has taken are dropped. A waiting caller is woken when no thread touches the job's
 * memory any more, whatever its outcome, and never before.
 *
 * A waiting caller may help: a thread that needs a batch has nothing better to do than to read it. With few cores that
 * spares one thread, and the cores do not change hands between the readers and the thread that needs the data.
 *
 * The outcome is written into memory of the caller's. So a caller that was interrupted may ask again, and nothing has to
 * be collected. The pieces stay the caller's too, unchanged until the outcome is there. Nothing allocates after a job
 * was accepted.
 *
 * A file may be mapped. Its pages in the cache are then copied without a call of the kernel, at twice the rate of pread
 * for rows of a few KiB. A map has no errors: a file that shrank, or a disk that failed, is a SIGBUS. Copies out of maps
 * are therefore guarded. The handler looks whether the fault lies in what this very thread is copying, and if so jumps
 * out of the copy; the piece is then read with pread, which says in numbers what is wrong. Any other SIGBUS goes to the
 * handler that was there before. A handler that is installed after ours gets the faults first, and need not pass
 * them on: from then on nothing is copied out of maps. See also move_run.
 *
 * Reads may be staged: they go to memory of the thread's own, which is small and hence in the CPU's caches, and are copied
 * to their place from there. Where the disk is a copy that a hypervisor makes, one copy after the other, that is a tenth
 * to a fifth faster than into hundreds of megabytes which are in no cache; our copy is made on another core meanwhile. A
 * thread that helps has no stage, and reads straight to the place.
 *
 * Roads not taken. Reads by map alone: see above. io_uring: forbidden in many containers; a page cache hit is a copy on
 * the calling thread there too. preadv: rows of a shuffled batch have nothing that one call could read together. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "clock.h"
#include "storm.h"

#define CHUNK ((int64_t)128 << 10)  /* bytes that a thread takes at once, if a piece is not larger */
#define JOINED ((int64_t)256 << 10) /* bytes that joined pieces have at most, so that a batch is still shared */
#define HUGE_PAGE ((size_t)2 << 20)
#define TAKEN ((int64_t)4096)       /* pieces that a thread takes at once: it looks at each under the lock */
#define STALLS 8                    /* calls that get no further, before a piece is given up */

typedef struct job {
    struct job *next;
    storm_rows_outcome *outcome;
    int64_t count, taken; /* of the pieces */
    int64_t in_flight;    /* threads at work on it */
    int32_t state, error; /* state: what it will be when the last thread leaves */
    int32_t write, unit;  /* write: to the file, not from it; unit: of the offset after a short count */
    int64_t failed, got;  /* of several joined ones, the first */
    const storm_rows_piece *pieces;
} job;

struct storm_rows {
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t work;  /* there is something to take, or to stop for */
    pthread_cond_t over;  /* some job is over */
    storm_read *read; /* pread and pwrite, but in tests */
    storm_write *write;
    pthread_t *threads;
    int32_t thread_count;
    job *first, **last; /* jobs with pieces that no thread has taken, oldest first */
    int64_t pending;    /* jobs that are not over */
    int stopping;
    char *stages;        /* of all threads, or NULL */
    int64_t stage_bytes; /* of one of them */
    int32_t staged;      /* threads that have taken theirs */
    void *mapped;        /* what the stages lie in, see map_stages */
    size_t mapped_bytes;
};

/* Where this thread reads to first; of no bytes: straight to the place. */
static _Thread_local struct {
    char *begin;
    int64_t bytes;
} stage;

/* What this thread is copying out of a map, and the way out. */
static _Thread_local struct {
    const char *volatile begin;
    const char *volatile end;
    sigjmp_buf out;
} guard;

static struct sigaction before_us;
static pthread_once_t installed = PTHREAD_ONCE_INIT;
static int install_error;

static void on_bus_error(int number, siginfo_t *info, void *context) {
    const int is_fault = info->si_code > 0 && info->si_code != BUS_MCEERR_AO; /* else it was sent: no address */
    const char *at = info->si_addr;
    if (is_fault && guard.begin && at >= guard.begin && at < guard.end)
        siglongjmp(guard.out, 1);
    if (before_us.sa_flags & SA_SIGINFO) {
        before_us.sa_sigaction(number, info, context);
    } else if (before_us.sa_handler != SIG_DFL && before_us.sa_handler != SIG_IGN) {
        before_us.sa_handler(number);
    } else if (is_fault || before_us.sa_handler == SIG_DFL) {
        signal(SIGBUS, SIG_DFL); /* the access is repeated when we return, and ends the process as it would have */
        if (!is_fault)
            raise(SIGBUS);
    }
}

/* Whether faults still come to us first. One call of the kernel for a whole run of pieces. */
static int guard_stands(void) {
    struct sigaction now;
    return sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_bus_error;
}

static int is_blocked(void) {
    sigset_t mask;
    return pthread_sigmask(SIG_SETMASK, NULL, &mask) == 0 && sigismember(&mask, SIGBUS) == 1;
}

static void install_guard(void) {
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&ours.sa_mask);
    install_error = sigaction(SIGBUS, &ours, &before_us) ? errno : 0;
}

int32_t storm_rows_map(int32_t fd, size_t bytes, void **address) {
    pthread_once(&installed, install_guard);
    if (install_error)
        return -install_error;
    void *mapped = mmap(NULL, bytes, PROT_READ, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED)
        return -errno;
    *address = mapped;
    return 0;
}

void storm_rows_unmap(void *address, size_t bytes) { munmap(address, bytes); }

/* 1 if the bytes were copied; 0 if a page of them could not be had. */
static int copy_mapped(const storm_rows_piece *piece) {
    const char *source = (const char *)(intptr_t)(piece->map + piece->source);
    guard.end = source + piece->bytes;
    if (sigsetjmp(guard.out, 0)) { /* the mask needs no saving: SA_NODEFER left it alone */
        guard.begin = NULL;
        return 0;
    }
    guard.begin = source;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    memcpy((void *)(intptr_t)piece->target, source, (size_t)piece->bytes);
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    guard.begin = NULL;
    return 1;
}

/* Bytes moved; `*error` is set if that is not enough. */
static int64_t move_piece(const storm_rows *rows, const job *from, const storm_rows_piece *piece, int32_t *error) {
    if (piece->fd < 0) {
        memcpy((void *)(intptr_t)piece->target, (const void *)(intptr_t)piece->source, (size_t)piece->bytes);
        return piece->bytes;
    }
    if (!piece->target) { /* only a hint: what it cannot do shows when the bytes are wanted */
        posix_fadvise((int)piece->fd, piece->source, piece->bytes, POSIX_FADV_WILLNEED);
        return piece->bytes;
    }
    const int staged = stage.bytes && !from->write;
    int64_t got = 0;
    for (int stalls = 0; got < piece->needed;) {
        const int64_t at = got - got % from->unit, left = piece->bytes - at;
        char *place = (char *)(intptr_t)piece->target + at;
        const size_t most = (size_t)(staged && stage.bytes < left ? stage.bytes : left);
        const ssize_t more =
            from->write ? rows->write((int)piece->fd, place, most, piece->source + at)
                        : rows->read((int)piece->fd, staged ? stage.begin : place, most, piece->source + at);
        if (more < 0 && errno == EINTR)
            continue;
        if (more < 0) {
            *error = errno;
            return got;
        }
        if (staged)
            memcpy(place, stage.begin, (size_t)more);
        if (at + more > got) {
            got = at + more;
            stalls = 0;
        } else if (more == 0 || ++stalls == STALLS) {
            *error = ENODATA;
            return got;
        }
    }
    return got;
}

static int continues(const storm_rows_piece *a, const storm_rows_piece *b) {
    return a->fd == b->fd && a->map == b->map && a->target && a->source + a->bytes == b->source &&
           a->target + a->bytes == b->target && a->needed == a->bytes && b->needed == b->bytes;
}

/* Moves a run of pieces, all or up to one that fails: its place, or `end`. What was copied out of a map is looked at
 * again, by the size of its file: behind the end of a file, the rest of its last page reads as zeros and faults not. */
static int64_t move_run(const storm_rows *rows, const job *from, int64_t begin, int64_t end, int64_t *got,
                        int32_t *error) {
    const storm_rows_piece *pieces = from->pieces;
    const int mapped = pieces[begin].map && guard_stands(); /* a job has maps throughout, or hardly any */
    int64_t fd = pieces[begin].fd, furthest = 0;            /* fd: of all pieces, or -1 */
    for (int64_t at = begin, next; at < end; at = next) {
        storm_rows_piece joined = pieces[at];
        for (next = at + 1; next < end && continues(&joined, &pieces[next]); next++) {
            joined.bytes += pieces[next].bytes;
            joined.needed += pieces[next].bytes;
        }
        if (!mapped || !joined.map || !copy_mapped(&joined)) {
            *got = move_piece(rows, from, &joined, error);
            if (*error)
                return at;
        }
        fd = joined.fd == fd ? fd : -1;
        furthest = joined.source + joined.bytes > furthest ? joined.source + joined.bytes : furthest;
    }
    struct stat whole;
    if (!mapped || (fd >= 0 && fstat((int)fd, &whole) == 0 && furthest <= whole.st_size))
        return end;
    int64_t size = 0;
    fd = -1;
    for (int64_t at = begin; at < end; at++) {
        const storm_rows_piece *piece = &pieces[at];
        if (!piece->map)
            continue;
        if (piece->fd != fd) {
            struct stat status;
            fd = piece->fd;
            size = fstat((int)fd, &status) ? 0 : status.st_size;
        }
        if (piece->source + piece->bytes > size) {
            *got = move_piece(rows, from, piece, error);
            if (*error)
                return at;
        }
    }
    return end;
}

static void end_job(storm_rows *rows, job *over) {
    over->outcome->error = over->error;
    over->outcome->piece = over->failed;
    over->outcome->got = over->got;
    over->outcome->end_ns = storm_now_ns();
    __atomic_store_n(&over->outcome->state, (uint32_t)over->state, __ATOMIC_RELEASE);
    free(over);
    rows->pending--;
    pthread_cond_broadcast(&rows->over);
}

/* Takes a job that needs no more threads off the list; the last thread in it, if any, ends it. */
static void unlink_job(storm_rows *rows, job *gone) {
    job **link = &rows->first;
    while (*link && *link != gone)
        link = &(*link)->next;
    if (!*link)
        return;
    *link = gone->next;
    if (!*link)
        rows->last = link;
}

/* The end of what a thread takes from `begin` on: TAKEN pieces, of CHUNK bytes, or of JOINED if all continue each other. */
static int64_t chunk_end(const job *from, int64_t begin) {
    const storm_rows_piece *pieces = from->pieces;
    int64_t end = begin + 1, bytes = pieces[begin].bytes;
    int is_one = 1;
    while (end < from->count && end - begin < TAKEN) {
        is_one = is_one && continues(&pieces[end - 1], &pieces[end]);
        if (bytes + pieces[end].bytes > (is_one ? JOINED : CHUNK))
            break;
        bytes += pieces[end++].bytes;
    }
    return end;
}

static void run_chunk(storm_rows *rows) {
    job *current = rows->first;
    const int64_t begin = current->taken, end = chunk_end(current, begin);
    if (begin == 0)
        current->outcome->begin_ns = storm_now_ns();
    current->taken = end;
    current->in_flight++;
    if (end == current->count)
        unlink_job(rows, current);
    pthread_mutex_unlock(&rows->lock);

    int32_t error = 0;
    int64_t got = 0;
    int64_t at = move_run(rows, current, begin, end, &got, &error);

    pthread_mutex_lock(&rows->lock);
    if (error && current->state != STORM_ROWS_FAILED) {
        current->state = STORM_ROWS_FAILED;
        current->error = error;
        current->failed = at;
        current->got = got;
        current->taken = current->count;
        unlink_job(rows, current);
    }
    if (--current->in_flight == 0 && current->taken == current->count)
        end_job(rows, current);
}

static void *work(void *argument) {
    storm_rows *rows = argument;
    pthread_mutex_lock(&rows->lock);
    if (rows->stages) {
        stage.begin = rows->stages + rows->stage_bytes * rows->staged++;
        stage.bytes = rows->stage_bytes;
    }
    for (;;) {
        if (rows->first)
            run_chunk(rows);
        else if (rows->stopping)
            break;
        else
            pthread_cond_wait(&rows->work, &rows->lock);
    }
    pthread_mutex_unlock(&rows->lock);
    return NULL;
}

/* A stage for each thread, in huge pages: of small ones the kernel would cut a read in pieces. Without memory for them
 * reads go straight to their places. Not for forked processes: they would be copied while the kernel reads to them. */
static void map_stages(storm_rows *rows, int32_t threads, int64_t stage_bytes) {
    const size_t bytes = (size_t)stage_bytes * (size_t)threads, whole = bytes + HUGE_PAGE;
    void *mapped = bytes ? mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
    if (mapped == MAP_FAILED)
        return;
    rows->mapped = mapped;
    rows->mapped_bytes = whole;
    rows->stages = (char *)mapped + (HUGE_PAGE - (uintptr_t)mapped % HUGE_PAGE) % HUGE_PAGE;
    rows->stage_bytes = stage_bytes;
    madvise(rows->stages, bytes, MADV_HUGEPAGE);
    madvise(mapped, whole, MADV_DONTFORK);
}

int32_t storm_rows_open(int32_t threads, int64_t stage_bytes, storm_rows **opened) {
    if (threads < 1 || stage_bytes < 0 || stage_bytes % 4096)
        return -EINVAL;
    storm_rows *rows = calloc(1, sizeof *rows);
    if (!rows)
        return -ENOMEM;
    rows->last = &rows->first;
    rows->read = pread;
    rows->write = pwrite;
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&rows->lock, NULL);
    pthread_cond_init(&rows->work, NULL);
    pthread_cond_init(&rows->over, &monotonic);
    pthread_condattr_destroy(&monotonic);
    map_stages(rows, threads, stage_bytes);
    rows->threads = calloc((size_t)threads, sizeof *rows->threads);
    int error = rows->threads ? 0 : ENOMEM;
    /* Signals, Ctrl-C first of all, belong to the threads of the interpreter. */
    sigset_t all, before;
    sigfillset(&all);
    sigdelset(&all, SIGBUS); /* a fault of the thread's own; blocked, it would end the process */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && rows->thread_count < threads) {
        error = pthread_create(&rows->threads[rows->thread_count], NULL, work, rows);
        if (!error) {
            char name[16];
            snprintf(name, sizeof name, "storm-rows-%d", (int)rows->thread_count % 1000);
            pthread_setname_np(rows->threads[rows->thread_count++], name);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        storm_rows_stop(rows);
        storm_rows_free(rows);
        return -error;
    }
    *opened = rows;
    return 0;
}

void storm_rows_replace(storm_rows *rows, storm_read *read, storm_write *write) {
    rows->read = read;
    rows->write = write;
}

int32_t storm_rows_submit(storm_rows *rows, const storm_rows_piece *pieces, int64_t count, int32_t write,
                          int32_t unit, storm_rows_outcome *outcome) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < count; i++) {
        const int is_memory = pieces[i].fd < 0;
        if (pieces[i].bytes < 0 || pieces[i].needed > pieces[i].bytes || (is_memory && !pieces[i].target) ||
            (write && (is_memory || pieces[i].map || !pieces[i].target)))
            return -EINVAL;
        bytes += pieces[i].bytes;
    }
    job *added = calloc(1, sizeof *added);
    if (!added)
        return -ENOMEM;
    added->outcome = outcome;
    added->state = STORM_ROWS_DONE;
    added->pieces = pieces;
    added->count = count;
    added->write = write;
    added->unit = unit;
    pthread_mutex_lock(&rows->lock);
    if (rows->stopping) {
        pthread_mutex_unlock(&rows->lock);
        free(added);
        return -ESHUTDOWN;
    }
    outcome->state = STORM_ROWS_PENDING;
    rows->pending++;
    if (count == 0) {
        outcome->begin_ns = storm_now_ns();
        end_job(rows, added);
    } else {
        *rows->last = added;
        rows->last = &added->next;
    }
    pthread_mutex_unlock(&rows->lock);
    /* Woken before the unlock, a thread would run into the lock and sleep again. */
    if (bytes > CHUNK)
        pthread_cond_broadcast(&rows->work);
    else if (count > 0)
        pthread_cond_signal(&rows->work);
    return 0;
}

/* Whether the job has pieces that no thread has taken; it is then on the list, first or behind the first one. */
static int is_listed(const storm_rows *rows, const storm_rows_outcome *outcome) {
    const job *at = rows->first;
    while (at && at->outcome != outcome)
        at = at->next;
    return at != NULL;
}

int32_t storm_rows_wait(storm_rows *rows, const storm_rows_outcome *outcome, double timeout_s, int32_t help) {
    struct timespec until = storm_deadline(timeout_s);
    const int64_t until_ns = (int64_t)until.tv_sec * 1000000000 + until.tv_nsec;
    int error = 0;
    help = help && !is_blocked(); /* a fault of a thread that blocks its signal ends the process */
    pthread_mutex_lock(&rows->lock);
    while (outcome->state == STORM_ROWS_PENDING && error != ETIMEDOUT) {
        if (!help || !is_listed(rows, outcome))
            error = pthread_cond_timedwait(&rows->over, &rows->lock, &until);
        else if (storm_now_ns() < until_ns)
            run_chunk(rows);
        else
            error = ETIMEDOUT;
    }
    int32_t state = (int32_t)outcome->state;
    pthread_mutex_unlock(&rows->lock);
    return state;
}

void storm_rows_cancel(storm_rows *rows, const storm_rows_outcome *only) {
    pthread_mutex_lock(&rows->lock);
    for (job **link = &rows->first; *link;) {
        job *gone = *link;
        if (only && gone->outcome != only) {
            link = &gone->next;
            continue;
        }
        unlink_job(rows, gone);
        gone->taken = gone->count;
        if (gone->state == STORM_ROWS_DONE)
            gone->state = STORM_ROWS_DROPPED;
        if (gone->in_flight == 0)
            end_job(rows, gone);
    }
    pthread_mutex_unlock(&rows->lock);
}

void storm_rows_stop(storm_rows *rows) {
    pthread_mutex_lock(&rows->lock);
    rows->stopping = 1;
    pthread_cond_broadcast(&rows->work);
    pthread_mutex_unlock(&rows->lock);
    storm_rows_cancel(rows, NULL);
    for (int32_t i = 0; i < rows->thread_count; i++)
        pthread_join(rows->threads[i], NULL);
    rows->thread_count = 0;
    if (rows->mapped)
        munmap(rows->mapped, rows->mapped_bytes);
    rows->mapped = NULL;
    pthread_mutex_lock(&rows->lock);
    while (rows->pending > 0) /* a waiting caller may be helping, on its own thread, which is never joined */
        pthread_cond_wait(&rows->over, &rows->lock);
    pthread_mutex_unlock(&rows->lock);
}

void storm_rows_free(storm_rows *rows) {
    pthread_cond_destroy(&rows->over);
    pthread_cond_destroy(&rows->work);
    pthread_mutex_destroy(&rows->lock);
    free(rows->threads);
    free(rows);
}
