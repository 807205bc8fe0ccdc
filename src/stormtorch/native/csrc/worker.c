/* Threads that run updates as their gradients arrive, and move the parts of files that go with them.
 *
 * A job waits for its ready flag, a word in pinned memory that a GPU writes and that no signal announces. When it is
 * ready it competes by (priority, order of submission), lowest first. All threads work on the best ready job, chunk by
 * chunk, and choose again after each chunk: a more urgent job that becomes ready takes over within a chunk's time, and
 * a job is finished as early as it can be, which matters because its unit's next load waits for exactly that.
 *
 * Where a job is, and what occupies a thread:
 *   waiting   its flag is not reached. One thread, the poller, looks every 20 us; threads that work look between chunks.
 *   ready     in the heap. Its top is what every free thread works on; `next` counts the elements already handed out.
 *   running   all handed out, off the heap, some chunks still in flight.
 *   over      done flag written, ticket in `reaped` until the owner collects it and lets go of the memory.
 * No jobs: every thread sleeps on a condition. All waiting: every thread but the poller does.
 *
 * A GPU that waits for a done flag waits for ever, so every job that was accepted gets its flag written, on every path:
 * finished, or abandoned, by stop or by its abort flag. Both abandon what never began only: a half-updated job would leave
 * weights of two different steps. Nothing allocates memory after a job was accepted, so nothing can fail there.
 *
 * The abort flag is for gradients that will never come, or come out of a GPU whose waits were let pass and hold nothing.
 * The code that aborts sets that flag before it lets anything pass; we look at it last, after the ready flag and just
 * before the first chunk, so that a gradient made of nothing is never used.
 *
 * A job with a file is one thread's from beginning to end: it reads, updates in memory of its own, tells that the update
 * is done, and writes back. So one thread reads while another updates and a third writes, without a plan of who does what when,
 * and there is as much memory as threads. Such jobs have a pool of their own: its threads sleep in the kernel most of the
 * time.
 *
 * Roads not taken. One job per thread: the first result comes threads-times later, and the tail of a step runs on one
 * core. Lock-free queues: a lock per 0.1 ms chunk does not show. An eventfd or a futex instead of polling: a GPU can only
 * write memory. OpenMP: its runtime clashes with torch's, and launchers set it to one thread. */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "clock.h"
#include "flags.h"
#include "storm.h"

#define POLL_NS 20000
#define BLOCK ((int64_t)8 << 20) /* bytes of a file that one call moves */
#define STALLS 8                 /* calls that get no further, before an access is given up */

typedef struct {
    storm_update update; /* the first one */
    storm_kernel *kernel;
    storm_file_part part; /* of no bytes in its first range: the job has no file */
    int64_t count;        /* of the updates, with a file */
    storm_flag ready, also, done, abort;
    int64_t ticket;
    int32_t priority;
    int64_t next;      /* elements handed out */
    int64_t in_flight; /* chunks being worked on */
    storm_update rest[]; /* of the updates */
} job;

typedef struct {
    job **items;
    int64_t count;
} job_list;

struct storm_pool {
    pthread_mutex_t lock; /* guards everything below */
    pthread_cond_t work;  /* a thread should look again */
    pthread_t *threads;
    int32_t thread_count;
    int32_t isa;
    job_list waiting;   /* in no order */
    job_list ready;     /* binary heap, most urgent first */
    int64_t *reaped;    /* tickets of jobs that are over; of abandoned ones, negative */
    int64_t reap_count;
    int64_t capacity;   /* of each of the three; never less than the accepted jobs whose tickets are not collected */
    int64_t held;       /* that number */
    int64_t last_poll_ns;
    int polling; /* some thread is the poller */
    int stopping;
    int32_t started;         /* threads that have begun */
    char *memory;            /* for parts of files */
    int64_t memory_bytes;    /* for each thread */
    storm_read *read;        /* pread and pwrite, but in tests */
    storm_write *write;
    int32_t moving;      /* threads that read or write a file */
    int64_t moving_ns;   /* since when there is one */
    storm_file_failure failure;
    storm_pool_stats stats;
};

static int has_file(const job *candidate) { return candidate->part.ranges[0].bytes > 0; }

static int is_ready(const job *candidate) {
    return (!candidate->ready.address || storm_reached(candidate->ready)) &&
           (!candidate->also.address || storm_reached(candidate->also));
}

static int is_aborted(const job *candidate) { return candidate->abort.address && storm_reached(candidate->abort); }

static int more_urgent(const job *a, const job *b) {
    return a->priority != b->priority ? a->priority < b->priority : a->ticket < b->ticket;
}

static void push_ready(job_list *heap, job *added) {
    int64_t hole = heap->count++;
    while (hole > 0 && more_urgent(added, heap->items[(hole - 1) / 2])) {
        heap->items[hole] = heap->items[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap->items[hole] = added;
}

static void pop_ready(job_list *heap) {
    job *last = heap->items[--heap->count];
    int64_t hole = 0;
    for (;;) {
        int64_t child = 2 * hole + 1;
        if (child >= heap->count)
            break;
        if (child + 1 < heap->count && more_urgent(heap->items[child + 1], heap->items[child]))
            child++;
        if (!more_urgent(heap->items[child], last))
            break;
        heap->items[hole] = heap->items[child];
        hole = child;
    }
    heap->items[hole] = last;
}

static void end_job(storm_pool *pool, job *over, int64_t ticket) {
    if (over->done.address)
        storm_advance(over->done);
    if (over->part.written.address)
        storm_advance(over->part.written);
    pool->reaped[pool->reap_count++] = ticket;
    pool->stats.pending--;
    free(over);
    if (pool->stats.pending == 0 && pool->stopping)
        pthread_cond_broadcast(&pool->work);
}

static void abandon_job(storm_pool *pool, job *dropped) {
    pool->stats.abandoned++;
    end_job(pool, dropped, -dropped->ticket);
}

/* Moves waiting jobs whose flag was reached to the heap, and ends aborted ones; at most once per poll interval. */
static void poll_waiting(storm_pool *pool) {
    if (pool->waiting.count == 0)
        return;
    int64_t now = storm_now_ns();
    if (now - pool->last_poll_ns < POLL_NS)
        return;
    pool->last_poll_ns = now;
    int64_t kept = 0, before = pool->waiting.count;
    for (int64_t i = 0; i < before; i++) {
        job *candidate = pool->waiting.items[i];
        if (is_ready(candidate))
            push_ready(&pool->ready, candidate);
        else if (is_aborted(candidate))
            abandon_job(pool, candidate);
        else
            pool->waiting.items[kept++] = candidate;
    }
    pool->waiting.count = kept;
    if (kept < before)
        pthread_cond_broadcast(&pool->work);
}

/* Moves a range; the bytes moved. Goes on after EINTR and short counts; `*error`: an errno, if it cannot. */
static int64_t move_range(const storm_pool *pool, const storm_file_range *range, int64_t unit, char *place, int write,
                          int64_t *error) {
    int64_t got = 0;
    for (int stalls = 0; got < range->bytes;) {
        const int64_t at = got - got % unit, left = range->bytes - at;
        const size_t most = (size_t)(left < BLOCK ? left : BLOCK);
        const ssize_t more = write ? pool->write((int)range->fd, place + at, most, range->offset + at)
                                   : pool->read((int)range->fd, place + at, most, range->offset + at);
        if (more < 0 && errno == EINTR)
            continue;
        if (more < 0) {
            *error = errno;
            return got;
        }
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

/* Moves all ranges of a job; 0 if one fails, which is then noted. Needs the lock, and releases it meanwhile. */
static int move_ranges(storm_pool *pool, const job *current, char *place, int write) {
    storm_file_failure failure = {.write = write};
    int64_t moved = 0;
    if (pool->moving++ == 0)
        pool->moving_ns = storm_now_ns();
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < STORM_FILE_RANGES && !failure.error; i++) {
        const storm_file_range *range = &current->part.ranges[i];
        failure.fd = range->fd;
        failure.offset = range->offset;
        failure.bytes = range->bytes;
        failure.got = move_range(pool, range, current->part.unit, place + range->at, write, &failure.error);
        moved += failure.got;
    }
    pthread_mutex_lock(&pool->lock);
    if (--pool->moving == 0)
        pool->stats.file_s += (double)(storm_now_ns() - pool->moving_ns) * 1e-9;
    *(write ? &pool->stats.written_bytes : &pool->stats.read_bytes) += moved;
    if (!failure.error)
        return 1;
    if (!current->count) /* NaN: what uses these bytes anyway shows it */
        for (int i = 0; i < STORM_FILE_RANGES; i++)
            memset(place + current->part.ranges[i].at, 0xff, (size_t)current->part.ranges[i].bytes);
    if (!pool->failure.error)
        pool->failure = failure;
    if (current->abort.address)
        storm_advance(current->abort);
    return 0;
}

static void *offset_in(char *memory, void *offset) { return memory + (intptr_t)offset; }

static void run_updates(storm_pool *pool, const job *current, char *place) {
    int64_t elements = 0;
    pthread_mutex_unlock(&pool->lock);
    const int64_t start = storm_now_ns();
    for (int64_t i = 0; i < current->count; i++) {
        storm_update update = i ? current->rest[i - 1] : current->update;
        if (current->part.has_weights)
            update.weight = offset_in(place, update.weight);
        if (update.weight_kind != STORM_FP32)
            update.master = offset_in(place, update.master);
        update.exp_avg = offset_in(place, update.exp_avg);
        update.exp_avg_sq = offset_in(place, update.exp_avg_sq);
        storm_read_factor(&update);
        storm_run(&update, storm_find_kernel(&update, pool->isa), 0, update.count);
        elements += update.count;
    }
    const int64_t spent = storm_now_ns() - start;
    pthread_mutex_lock(&pool->lock);
    pool->stats.busy_s += (double)spent * 1e-9;
    pool->stats.elements += elements;
}

/* Runs a job with a file; `memory`: of this thread. */
static void run_file_job(storm_pool *pool, job *current, char *memory) {
    char *place = current->count ? memory : current->part.target;
    if (move_ranges(pool, current, place, 0) && current->count) {
        run_updates(pool, current, place);
        if (current->done.address)
            storm_advance(current->done);
        move_ranges(pool, current, place, 1);
    }
    pool->stats.finished++;
    end_job(pool, current, current->ticket);
}

/* Takes the next chunk of the most urgent ready job and runs it with the lock released; or drops the job, if it was
 * aborted before it began. */
static void run_chunk(storm_pool *pool, int32_t thread) {
    job *current = pool->ready.items[0];
    if (current->next == 0 && is_aborted(current)) {
        pop_ready(&pool->ready);
        abandon_job(pool, current);
        return;
    }
    if (has_file(current)) {
        pop_ready(&pool->ready);
        current->next = 1;
        run_file_job(pool, current, pool->memory + thread * pool->memory_bytes);
        return;
    }
    if (current->next == 0)
        storm_read_factor(&current->update); /* not earlier: the writer of the ready flag writes the factor before it */
    int64_t first = current->next, last = first + STORM_CHUNK;
    if (last >= current->update.count) {
        last = current->update.count;
        pop_ready(&pool->ready);
    }
    current->next = last;
    current->in_flight++;
    pthread_mutex_unlock(&pool->lock);

    int64_t start = storm_now_ns();
    storm_run(&current->update, current->kernel, first, last);
    int64_t spent = storm_now_ns() - start;

    pthread_mutex_lock(&pool->lock);
    pool->stats.busy_s += (double)spent * 1e-9;
    if (current->update.grad)
        pool->stats.elements += last - first;
    if (--current->in_flight == 0 && current->next == current->update.count) {
        pool->stats.finished++;
        end_job(pool, current, current->ticket);
    }
}

static void *work(void *argument) {
    storm_pool *pool = argument;
    fesetenv(FE_DFL_ENV);               /* inherited from a thread that may flush subnormals */
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0); /* otherwise the kernel stretches a sleep of 20 us to 70 */
    pthread_mutex_lock(&pool->lock);
    const int32_t thread = pool->started++;
    for (;;) {
        poll_waiting(pool);
        if (pool->ready.count > 0) {
            run_chunk(pool, thread);
        } else if (pool->stopping && pool->stats.pending == 0) {
            break;
        } else if (pool->waiting.count > 0 && !pool->polling) {
            pool->polling = 1;
            pthread_mutex_unlock(&pool->lock);
            storm_sleep_ns(POLL_NS);
            pthread_mutex_lock(&pool->lock);
            pool->polling = 0;
            poll_waiting(pool);
            /* If this thread now works, another must poll: it may sleep, and only this one knows. */
            if (pool->ready.count > 0 && pool->waiting.count > 0)
                pthread_cond_signal(&pool->work);
        } else {
            pthread_cond_wait(&pool->work, &pool->lock);
        }
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

static int32_t start_threads(storm_pool *pool, const int32_t *cores, int32_t core_count, int32_t threads) {
    pthread_attr_t attributes;
    cpu_set_t *mask = NULL;
    int error = pthread_attr_init(&attributes);
    if (error)
        return -error;
    if (core_count > 0) {
        int32_t highest = 0;
        for (int32_t i = 0; i < core_count; i++) {
            if (cores[i] < 0)
                error = EINVAL;
            highest = cores[i] > highest ? cores[i] : highest;
        }
        size_t bytes = CPU_ALLOC_SIZE((size_t)highest + 1);
        mask = CPU_ALLOC((size_t)highest + 1);
        if (!mask)
            error = ENOMEM;
        if (!error) {
            CPU_ZERO_S(bytes, mask);
            for (int32_t i = 0; i < core_count; i++)
                CPU_SET_S((size_t)cores[i], bytes, mask);
            error = pthread_attr_setaffinity_np(&attributes, bytes, mask);
        }
    }
    /* Signals, Ctrl-C first of all, belong to the threads of the interpreter. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (!error && pool->thread_count < threads) {
        error = pthread_create(&pool->threads[pool->thread_count], &attributes, work, pool);
        if (!error) {
            char name[16];
            snprintf(name, sizeof name, "storm-adam-%d", (int)pool->thread_count % 1000);
            pthread_setname_np(pool->threads[pool->thread_count++], name);
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (mask)
        CPU_FREE(mask);
    pthread_attr_destroy(&attributes);
    return -error;
}

int32_t storm_pool_open(const int32_t *cores, int32_t core_count, int32_t threads, int32_t isa, storm_pool **opened) {
    if (threads < 1 || !storm_isa_name(isa) || !storm_isa_supported(isa))
        return -EINVAL;
    storm_pool *pool = calloc(1, sizeof *pool);
    if (!pool)
        return -ENOMEM;
    pool->isa = isa;
    pool->read = pread;
    pool->write = pwrite;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pool->threads = calloc((size_t)threads, sizeof *pool->threads);
    int32_t error = pool->threads ? start_threads(pool, cores, core_count, threads) : -ENOMEM;
    if (error) {
        storm_pool_stop(pool);
        storm_pool_free(pool);
        return error;
    }
    *opened = pool;
    return 0;
}

/* Room for one more job in all three lists. A failure leaves them as they are. */
static int grow(storm_pool *pool) {
    if (pool->held < pool->capacity)
        return 0;
    size_t wanted = pool->capacity ? 2 * (size_t)pool->capacity : 64;
    job **waiting = realloc(pool->waiting.items, wanted * sizeof *waiting);
    if (waiting)
        pool->waiting.items = waiting;
    job **ready = realloc(pool->ready.items, wanted * sizeof *ready);
    if (ready)
        pool->ready.items = ready;
    int64_t *reaped = realloc(pool->reaped, wanted * sizeof *reaped);
    if (reaped)
        pool->reaped = reaped;
    if (!waiting || !ready || !reaped)
        return ENOMEM;
    pool->capacity = (int64_t)wanted;
    return 0;
}

/* Queues a job, which the pool owns from then on; frees it if it is refused. */
static int32_t accept_job(storm_pool *pool, job *added, int64_t ticket, int32_t priority, storm_flag ready,
                          storm_flag also, storm_flag done, storm_flag abort) {
    pthread_mutex_lock(&pool->lock);
    int error = pool->stopping ? ESHUTDOWN : grow(pool);
    if (error) {
        pthread_mutex_unlock(&pool->lock);
        free(added);
        return -error;
    }
    added->ready = ready;
    added->also = also;
    added->done = done;
    added->abort = abort;
    added->ticket = ticket;
    added->priority = priority;
    pool->held++;
    pool->stats.pending++;
    if (!is_ready(added)) {
        pool->waiting.items[pool->waiting.count++] = added;
        pthread_cond_signal(&pool->work);
    } else {
        push_ready(&pool->ready, added);
        if (!has_file(added) && added->update.count > STORM_CHUNK)
            pthread_cond_broadcast(&pool->work);
        else
            pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

int32_t storm_pool_submit(storm_pool *pool, const storm_update *update, int64_t ticket, int32_t priority,
                          storm_flag ready, storm_flag also, storm_flag done, storm_flag abort) {
    storm_kernel *kernel = storm_find_kernel(update, pool->isa);
    if (!kernel)
        return -EINVAL;
    job *added = calloc(1, sizeof *added);
    if (!added)
        return -ENOMEM;
    added->update = *update;
    added->kernel = kernel;
    return accept_job(pool, added, ticket, priority, ready, also, done, abort);
}

int32_t storm_pool_submit_file(storm_pool *pool, const storm_file_part *part, const storm_update *updates,
                               int64_t count, int64_t ticket, int32_t priority, storm_flag ready, storm_flag also,
                               storm_flag done, storm_flag abort) {
    if (part->ranges[0].bytes <= 0 || part->unit <= 0 || (!count && !part->target))
        return -EINVAL;
    for (int i = 0; count && i < STORM_FILE_RANGES; i++)
        if (part->ranges[i].at + part->ranges[i].bytes > pool->memory_bytes)
            return -EINVAL;
    for (int64_t i = 0; i < count; i++)
        if (!storm_find_kernel(&updates[i], pool->isa))
            return -EINVAL;
    job *added = calloc(1, sizeof *added + (count > 1 ? (size_t)(count - 1) * sizeof *updates : 0));
    if (!added)
        return -ENOMEM;
    added->part = *part;
    added->count = count;
    if (count)
        added->update = updates[0];
    if (count > 1)
        memcpy(added->rest, updates + 1, (size_t)(count - 1) * sizeof *updates);
    return accept_job(pool, added, ticket, priority, ready, also, done, abort);
}

void storm_pool_lend(storm_pool *pool, void *memory, int64_t bytes) {
    pthread_mutex_lock(&pool->lock);
    pool->memory = memory;
    pool->memory_bytes = bytes;
    pthread_mutex_unlock(&pool->lock);
}

void storm_pool_replace(storm_pool *pool, storm_read *read, storm_write *write) {
    pthread_mutex_lock(&pool->lock);
    pool->read = read;
    pool->write = write;
    pthread_mutex_unlock(&pool->lock);
}

void storm_pool_read_failure(storm_pool *pool, storm_file_failure *failure) {
    pthread_mutex_lock(&pool->lock);
    *failure = pool->failure;
    pthread_mutex_unlock(&pool->lock);
}

int64_t storm_pool_reap(storm_pool *pool, int64_t *tickets, int64_t capacity) {
    pthread_mutex_lock(&pool->lock);
    int64_t moved = 0;
    while (moved < capacity && pool->reap_count > 0)
        tickets[moved++] = pool->reaped[--pool->reap_count];
    pool->held -= moved;
    pthread_mutex_unlock(&pool->lock);
    return moved;
}

void storm_pool_read_stats(storm_pool *pool, storm_pool_stats *stats) {
    pthread_mutex_lock(&pool->lock);
    *stats = pool->stats;
    pthread_mutex_unlock(&pool->lock);
}

int64_t storm_pool_stop(storm_pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->stopping = 1;
    job_list lists[] = {pool->waiting, pool->ready};
    pool->waiting.count = pool->ready.count = 0;
    for (int list = 0; list < 2; list++)
        for (int64_t i = 0; i < lists[list].count; i++) {
            job *candidate = lists[list].items[i];
            if (candidate->next > 0) { /* begun: put back to be finished; lands at or before its own place */
                push_ready(&pool->ready, candidate);
                continue;
            }
            abandon_job(pool, candidate);
        }
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->thread_count; i++)
        pthread_join(pool->threads[i], NULL);
    pool->thread_count = 0;
    return pool->stats.abandoned;
}

void storm_pool_free(storm_pool *pool) {
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->lock);
    free(pool->waiting.items);
    free(pool->ready.items);
    free(pool->reaped);
    free(pool->threads);
    free(pool);
}
