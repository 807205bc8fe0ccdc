/* Monotonic time and short sleeps. */
#ifndef STORM_CLOCK_H
#define STORM_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline int64_t storm_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Now plus `seconds`, which is cut to between none and a year so that it always fits. */
static inline int64_t storm_deadline_ns(double seconds) {
    double most = 3e7;
    return storm_now_ns() + (int64_t)((seconds > 0 ? seconds < most ? seconds : most : 0) * 1e9);
}

static inline struct timespec storm_deadline(double seconds) {
    int64_t at = storm_deadline_ns(seconds);
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000), .tv_nsec = (long)(at % 1000000000)};
}

static inline void storm_sleep_ns(long ns) {
    struct timespec span = {.tv_sec = 0, .tv_nsec = ns};
    nanosleep(&span, NULL); /* woken early by a signal: the caller looks again anyway */
}

#endif
