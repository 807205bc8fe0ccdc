/* What the shared library offers. It is loaded with ctypes: no Python.h and no torch headers, so one build serves every
 * Python and every torch. Functions that can fail return a negative errno. Nothing here takes the GIL. */
#ifndef STORM_H
#define STORM_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "adamw.h"

#define STORM_API __attribute__((visibility("default")))

/* Raised with every change of a struct or a signature below; library.py refuses a library of another number. */
#define STORM_ABI 13u

typedef struct storm_pool storm_pool;

/* A 32-bit word and the value that it must have reached: (int32_t)(word - value) >= 0, so counters may wrap.
 * It is the rule of cuStreamWaitValue32 with GEQ. address == NULL: no flag. */
typedef struct {
    uint32_t *address;
    uint32_t value;
} storm_flag;

typedef struct {
    double busy_s;     /* thread-seconds spent in the kernel */
    int64_t elements;  /* elements updated */
    int64_t finished;  /* jobs updated entirely */
    int64_t abandoned; /* jobs dropped before they began, by stop or by their abort flag */
    int64_t pending;   /* jobs queued or running */
    double file_s;     /* seconds in which at least one thread was reading or writing a file */
    int64_t read_bytes, written_bytes;
} storm_pool_stats;

typedef ssize_t storm_read(int fd, void *target, size_t bytes, off_t offset);
typedef ssize_t storm_write(int fd, const void *target, size_t bytes, off_t offset);

/* Bytes of a file, and where they begin in the memory of a job. */
typedef struct {
    int64_t fd, offset, bytes, at;
} storm_file_range;

enum { STORM_FILE_RANGES = 4 };

/* The part of a job that lies in files: the ranges that have bytes. `unit`: offsets after a short count are multiples of
 * it, as direct I/O needs. Without updates the ranges are read to `target`. With updates they are read to the memory that
 * the pool has for each thread, updated there, and written back; `written` follows when they are in their files. `has_weights`: the weights are among
 * them. */
typedef struct {
    storm_file_range ranges[STORM_FILE_RANGES];
    int64_t unit, has_weights;
    void *target;
    storm_flag written;
} storm_file_part;

/* The first access to a file that failed: an errno, or ENODATA where no call moves more. errno 0: none has failed. */
typedef struct {
    int64_t error, fd, offset, bytes, got, write;
} storm_file_failure;

STORM_API uint32_t storm_abi(void);
STORM_API size_t storm_update_size(void);

/* Instruction sets this library was compiled for, 0 the plainest; storm_isa_best() is the fastest this CPU has. */
STORM_API int32_t storm_isa_count(void);
STORM_API const char *storm_isa_name(int32_t isa);
STORM_API int32_t storm_isa_supported(int32_t isa);
STORM_API int32_t storm_isa_best(void);

/* Updates everything before it returns; the caller's thread is one of `threads`. */
STORM_API int32_t storm_adamw(const storm_update *update, int32_t isa, int32_t threads);

/* Threads that take jobs from one queue. `cores` is the affinity mask of all of them; none: inherited. */
STORM_API int32_t storm_pool_open(const int32_t *cores, int32_t core_count, int32_t threads, int32_t isa,
                                  storm_pool **pool);
/* Queues one update. `ticket` is the caller's name for it: above 0, and larger than those before. A caller that may be
 * interrupted can thus note what the job needs before this call, rather than after. The memory of the update and of its
 * flags must live until the ticket is reaped. The update's grad_factor is read when the job begins, and so after its
 * ready flag was reached. `also`: a second flag to wait for. `abort`: once reached, the job is abandoned instead of
 * begun. */
STORM_API int32_t storm_pool_submit(storm_pool *pool, const storm_update *update, int64_t ticket, int32_t priority,
                                    storm_flag ready, storm_flag also, storm_flag done, storm_flag abort);
/* Queues a job with a file. In `updates`, `master` and both moments are offsets in the memory of the job, and so is
 * `weight` where the part says so. `done` is
 * written when all updates are, before their states are in the file. If an access fails, the word of `abort` is written
 * before any other. */
STORM_API int32_t storm_pool_submit_file(storm_pool *pool, const storm_file_part *part, const storm_update *updates,
                                         int64_t count, int64_t ticket, int32_t priority, storm_flag ready,
                                         storm_flag also, storm_flag done, storm_flag abort);
/* Memory for parts of files, `bytes` for each thread; before the first such job, until the pool has stopped. */
STORM_API void storm_pool_lend(storm_pool *pool, void *memory, int64_t bytes);
/* Puts other functions in the place of pread and pwrite, with which a test makes a disk fail. Before the first job. */
STORM_API void storm_pool_replace(storm_pool *pool, storm_read *read, storm_write *write);
STORM_API void storm_pool_read_failure(storm_pool *pool, storm_file_failure *failure);
/* Moves up to `capacity` tickets of jobs that are over into `tickets`, those of abandoned ones negative; returns how
 * many. */
STORM_API int64_t storm_pool_reap(storm_pool *pool, int64_t *tickets, int64_t capacity);
STORM_API void storm_pool_read_stats(storm_pool *pool, storm_pool_stats *stats);
/* Ends the threads; returns how many jobs were abandoned. Reaping still works afterwards. Call it before free. */
STORM_API int64_t storm_pool_stop(storm_pool *pool);
STORM_API void storm_pool_free(storm_pool *pool);

/* Stores a zero into every 4 KiB of fresh, zero-filled memory, so that its pages exist. Destroys anything else. */
STORM_API int32_t storm_touch(void *address, size_t bytes, int32_t threads);

/* sampler.c: `ask(subject)` at random moments, about every `period_ns`, on a thread that has called `enter(context)` and
   `relax` first; both may be null. No launch takes `launch_ns`. */
typedef struct storm_sampler storm_sampler;
typedef struct {
    int64_t asked;      /* samples */
    int64_t counted_ns; /* the time that they stand for: */
    int64_t idle_ns;    /* of that, answered "yes" */
    int64_t launches;   /* that a question had to wait for */
    int64_t watched_ns; /* in which they were looked for */
    int64_t stops;      /* a "no", and the next answer "yes": work ran out */
    int64_t exposed_ns; /* in which they were looked for */
} storm_sampler_counts;
STORM_API int32_t storm_sampler_open(void *ask, int32_t no, void *enter, void *relax, void *context, void *subject,
                                     int64_t period_ns, int64_t launch_ns, storm_sampler **out);
STORM_API void storm_sampler_watch(storm_sampler *s, void *subject);
STORM_API void storm_sampler_read(storm_sampler *s, storm_sampler_counts *out);
STORM_API void storm_sampler_close(storm_sampler *s);

/* The word; the caller sees what its writer wrote before. */
STORM_API uint32_t storm_load_flag(const uint32_t *address);
/* Writes the value, unless the word has already reached it; a thread that sees it sees what this thread wrote before. */
STORM_API void storm_set_flag(storm_flag flag);
/* 1 when the flag was reached within `timeout_s`, else 0. */
STORM_API int32_t storm_wait_flag(storm_flag flag, double timeout_s);

typedef struct storm_rows storm_rows;

/* One run of bytes and the place where it goes. fd < 0: `source` is an address. target == 0: the bytes are only to be
 * brought into the page cache. Less than `bytes` will do where the file ends, if it is at least `needed`. `map`: where the
 * file is mapped, by storm_rows_map and at least up to the end of the piece; 0 if it is not. */
typedef struct {
    int64_t fd, source, bytes, needed, target, map;
} storm_rows_piece;

enum { STORM_ROWS_PENDING, STORM_ROWS_DONE, STORM_ROWS_FAILED, STORM_ROWS_DROPPED };

/* How a job ended. `piece`, `error` and `got` tell of the piece that failed: its index, an errno (ENODATA: no call moves
 * more), and how many bytes were moved. Pieces that continue each other count as one, under the index of the first.
 * `begin_ns`, `end_ns`: of CLOCK_MONOTONIC, when a thread took the first piece, and when the last thread had left. */
typedef struct {
    uint32_t state;
    int32_t error;
    int64_t piece, got, begin_ns, end_ns;
} storm_rows_outcome;

/* Threads that read and write files and copy memory; see rows.c. */
/* Maps the first `bytes` of a file to copy from. From the first call on, this library looks at SIGBUS first. */
STORM_API int32_t storm_rows_map(int32_t fd, size_t bytes, void **address);
/* No job may use the map any more. */
STORM_API void storm_rows_unmap(void *address, size_t bytes);
/* `stage_bytes`: files are read through memory of each thread's own, so many bytes at once, a multiple of 4096; 0: not. */
STORM_API int32_t storm_rows_open(int32_t threads, int64_t stage_bytes, storm_rows **rows);
/* Puts other functions in the place of pread and pwrite, with which a test makes a disk fail. Before the first job. */
STORM_API void storm_rows_replace(storm_rows *rows, storm_read *read, storm_write *write);
/* Queues a job. `write`: each piece goes from `target` to `source` of its file. `unit`: after a short count a piece goes
 * on at a multiple of it: 1, or what direct I/O needs. `pieces`, unchanged, and the memory, the
 * descriptors and `outcome` must live until the outcome is not PENDING any more, or until stop has returned. */
STORM_API int32_t storm_rows_submit(storm_rows *rows, const storm_rows_piece *pieces, int64_t count, int32_t write,
                                    int32_t unit, storm_rows_outcome *outcome);
/* Blocks until the job is over or `timeout_s` passed; returns the state of its outcome. `help`: this thread works on the
 * queue until all of the job is taken. */
STORM_API int32_t storm_rows_wait(storm_rows *rows, const storm_rows_outcome *outcome, double timeout_s, int32_t help);
/* Drops what no thread has begun: of the job with this outcome, or if it is NULL of all jobs. Those jobs are over once
 * the threads in them have left. */
STORM_API void storm_rows_cancel(storm_rows *rows, const storm_rows_outcome *only);
/* Cancels, then ends the threads; every job is over when it returns. Call it before free. */
STORM_API void storm_rows_stop(storm_rows *rows);
STORM_API void storm_rows_free(storm_rows *rows);

#endif
