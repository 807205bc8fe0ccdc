/* What the shared library offers. It is loaded with ctypes: no Python.h and no torch headers, so one build serves every
 * Python and every torch. Functions that can fail return a negative errno. Nothing here takes the GIL. */
#ifndef STORM_H
#define STORM_H

#include <stddef.h>
#include <stdint.h>

#include "adamw.h"

#define STORM_API __attribute__((visibility("default")))

/* Raised with every change of a struct or a signature below; library.py refuses a library of another number. */
#define STORM_ABI 3u

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
} storm_pool_stats;

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
 * ready flag was reached. `abort`: once reached, the job is abandoned instead of begun. */
STORM_API int32_t storm_pool_submit(storm_pool *pool, const storm_update *update, int64_t ticket, int32_t priority,
                                    storm_flag ready, storm_flag done, storm_flag abort);
/* Moves up to `capacity` tickets of jobs that are over into `tickets`; returns how many. */
STORM_API int64_t storm_pool_reap(storm_pool *pool, int64_t *tickets, int64_t capacity);
/* 1 when no job is left, 0 when `timeout_s` passed first. */
STORM_API int32_t storm_pool_drain(storm_pool *pool, double timeout_s);
STORM_API void storm_pool_read_stats(storm_pool *pool, storm_pool_stats *stats);
/* Ends the threads; returns how many jobs were abandoned. Reaping still works afterwards. Call it before free. */
STORM_API int64_t storm_pool_stop(storm_pool *pool);
STORM_API void storm_pool_free(storm_pool *pool);

/* Stores a zero into every 4 KiB of fresh, zero-filled memory, so that its pages exist. Destroys anything else. */
STORM_API int32_t storm_touch(void *address, size_t bytes, int32_t threads);
/* The word; who calls sees what its writer wrote before. */
STORM_API uint32_t storm_load_flag(const uint32_t *address);
/* Writes the value, unless the word has already reached it; who sees it sees what this thread wrote before. */
STORM_API void storm_set_flag(storm_flag flag);
/* 1 when the flag was reached within `timeout_s`, else 0. */
STORM_API int32_t storm_wait_flag(storm_flag flag, double timeout_s);

#endif
