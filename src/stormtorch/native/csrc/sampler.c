/* A thread that asks a question at random moments, and counts the answers.
 *
 * The question is the driver's: has this stream finished all that was enqueued? Asked by the thread that launches
 * kernels it would always be asked just before a launch, when the answer is "yes" most often. Asked at moments that have
 * nothing to do with launches, the share of "yes" is the share of time in which the GPU waited for the host.
 *
 * No Python here, and no GIL: a Python thread that woke a thousand times a second would slow the launches down that it
 * watches. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "clock.h"
#include "storm.h"

struct storm_sampler {
    pthread_t thread;
    int32_t (*ask)(void *subject); /* 0: yes; `no`: no; anything else ends the thread */
    int32_t (*enter)(void *context);
    int32_t (*relax)(int32_t *mode);
    void *context;
    void *subject; /* atomic */
    int32_t no;
    int64_t period_ns;
    int64_t asked, yes; /* atomic; written by the thread alone */
    int32_t stopping;   /* atomic */
};

static void *sample(void *argument) {
    storm_sampler *s = argument;
    int32_t relaxed = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED: asking must not spoil a capture that the user makes */
    if ((s->enter && s->enter(s->context)) || (s->relax && s->relax(&relaxed)))
        return NULL;
    uint64_t random = (uint64_t)storm_now_ns() | 1;
    while (!__atomic_load_n(&s->stopping, __ATOMIC_ACQUIRE)) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        storm_sleep_ns((long)(s->period_ns / 2 + (int64_t)(random % (uint64_t)s->period_ns)));
        int32_t answer = s->ask(__atomic_load_n(&s->subject, __ATOMIC_ACQUIRE));
        if (answer != 0 && answer != s->no)
            return NULL;
        if (answer == 0)
            __atomic_fetch_add(&s->yes, 1, __ATOMIC_RELAXED);
        __atomic_fetch_add(&s->asked, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

int32_t storm_sampler_open(void *ask, int32_t no, void *enter, void *relax, void *context, void *subject,
                           int64_t period_ns, storm_sampler **out) {
    if (!ask || period_ns < 1)
        return -EINVAL;
    storm_sampler *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    __extension__ s->ask = (int32_t (*)(void *))ask;
    __extension__ s->enter = (int32_t (*)(void *))enter;
    __extension__ s->relax = (int32_t (*)(int32_t *))relax;
    s->no = no, s->context = context, s->subject = subject, s->period_ns = period_ns;
    sigset_t all, before;
    sigfillset(&all); /* signals are for the program's own threads */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&s->thread, NULL, sample, s);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(s);
        return -failed;
    }
    *out = s;
    return 0;
}

void storm_sampler_watch(storm_sampler *s, void *subject) { __atomic_store_n(&s->subject, subject, __ATOMIC_RELEASE); }

void storm_sampler_read(storm_sampler *s, int64_t *asked, int64_t *yes) {
    *asked = __atomic_load_n(&s->asked, __ATOMIC_ACQUIRE);
    *yes = __atomic_load_n(&s->yes, __ATOMIC_RELAXED);
}

void storm_sampler_close(storm_sampler *s) {
    __atomic_store_n(&s->stopping, 1, __ATOMIC_RELEASE);
    pthread_join(s->thread, NULL);
    free(s);
}
