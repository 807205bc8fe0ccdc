/* First touch of fresh memory, and flag words seen from the host: what would hold the GIL, or needs memory order. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>

#include "clock.h"
#include "flags.h"
#include "storm.h"

/* Threads take whole blocks of this size, so that no two fault on one huge page. */
#define BLOCK ((size_t)2 << 20)

typedef struct {
    char *address;
    size_t bytes;
    size_t next; /* first byte that no thread has taken; atomic */
} span;

/* A write that changes nothing, also while other threads write there: a byte that is not 0 is in a page that exists.
   Not "or 0", of which a compiler may make a read. */
static void exist(char *byte) {
    char nothing = 0;
    (void)__atomic_compare_exchange_n(byte, &nothing, 0, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static void *touch_blocks(void *argument) {
    span *s = argument;
    for (;;) {
        size_t first = __atomic_fetch_add(&s->next, BLOCK, __ATOMIC_RELAXED);
        if (first >= s->bytes)
            return NULL;
        size_t last = s->bytes - first < BLOCK ? s->bytes : first + BLOCK;
        for (size_t at = first; at < last; at += 4096)
            exist(s->address + at);
    }
}

int32_t storm_touch(void *address, size_t bytes, int32_t threads) {
    enum { MOST = 64 };
    if (threads < 1)
        return -EINVAL;
    span s = {address, bytes, 0};
    pthread_t others[MOST];
    int32_t started = 0;
    while (started < threads - 1 && started < MOST && (size_t)started < bytes / (4 * BLOCK) &&
           pthread_create(&others[started], NULL, touch_blocks, &s) == 0)
        started++;
    touch_blocks(&s);
    for (int32_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    if (bytes > 0)
        exist(s.address + bytes - 1); /* its page, where the range does not begin at a page's start */
    return 0;
}

uint32_t storm_load_flag(const uint32_t *address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }

void storm_set_flag(storm_flag flag) { storm_advance(flag); }

int32_t storm_wait_flag(storm_flag flag, double timeout_s) {
    const int64_t start = storm_now_ns(), until = storm_deadline_ns(timeout_s);
    for (;;) {
        if (storm_reached(flag))
            return 1;
        int64_t now = storm_now_ns();
        if (now >= until)
            return 0;
        if (now - start > 50000) /* what comes soon is met at once, what does not costs no core */
            storm_sleep_ns(20000);
    }
}
