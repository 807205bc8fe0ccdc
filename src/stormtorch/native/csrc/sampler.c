/* A thread that asks a question at random moments, and counts the answers.
 *
 * The question is the driver's: has this stream finished all that was enqueued? Asked by the thread that launches
 * kernels it would always be asked just before a launch, when the answer is "yes" most often. Asked at moments that have
 * nothing to do with launches, the share of "yes" is the share of time in which the GPU waited for the host.
 *
 * But the driver answers nothing while it launches: it holds a lock, for 4 to 10 microseconds. A question that falls
 * into a launch is *blocked*: it is answered behind it, and then there is work, as there is until the kernel runs, some
 * microseconds later. A launch onto an idle GPU makes 13 microseconds look busy in this way, and a kernel behind another
 * one starts 1.5 microseconds late: together 3 to 6 per cent of the time (H200, torch.profiler beside every question).
 * So from each sample on, this thread asks for some microseconds, and counts the launches, which block a question (a
 * "no" takes 0.4 to 1 microseconds, a "yes" 2), and the *stops*: a "no", and then a "yes", so that the next launch is
 * onto an idle GPU. It finds half of each. The reader knows what each costs.
 *
 * A thread that waits for the lock may be woken much later, and a launch itself may wait, for 20 milliseconds even,
 * because the queue of the GPU is full. Nothing else is asked meanwhile, and both come when the GPU has work. So samples
 * count by time: each for half of the time since the one before it, and half of the time until the next. Counted by
 * number, they found 13 per cent idle where it was 10. The same holds for rates: a launch that waits is one launch in
 * the whole of that time.
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

#define SPIN_NS 24000    /* at most, between waking up and the sample: several times what a launch takes */
#define BLOCKED_NS 2000  /* and twice the shortest question: what takes longer has waited for the lock */

struct storm_sampler {
    pthread_t thread;
    int32_t (*ask)(void *subject); /* 0: yes; `no`: no; anything else ends the thread */
    int32_t (*enter)(void *context);
    int32_t (*relax)(int32_t *mode);
    void *context;
    void *subject; /* atomic */
    int32_t no;
    int64_t period_ns, launch_ns;
    int64_t least_ns;            /* that a question has taken */
    int64_t known_ns;            /* until when time has been counted; 0: none yet */
    int64_t *was;                /* the counter of the state at that time; NULL: it had work */
    storm_sampler_counts counts; /* atomic, each; written by the thread alone */
    int32_t stopping;            /* atomic */
};

static void count(int64_t *counter, int64_t more) { __atomic_fetch_add(counter, more, __ATOMIC_RELAXED); }

typedef enum { AT_ONCE, BLOCKED, LONG } wait_kind;

/* Asks once: 1 for yes, 0 for no, -1 for an error; how long that took, and what the question has waited for. */
static int timed(storm_sampler *s, int64_t *took, wait_kind *waited) {
    int64_t began = storm_now_ns();
    int32_t answer = s->ask(__atomic_load_n(&s->subject, __ATOMIC_ACQUIRE));
    *took = storm_now_ns() - began;
    if (*took < s->least_ns)
        s->least_ns = *took;
    *waited = *took > s->launch_ns ? LONG : *took > 2 * s->least_ns + BLOCKED_NS ? BLOCKED : AT_ONCE;
    return answer == 0 ? 1 : answer == s->no ? 0 : -1;
}

/* Counts the time since the last state that is known, half for that one and half for this one. */
static void pass(storm_sampler *s, int64_t until_ns, int64_t *state) {
    int64_t spent = s->known_ns ? until_ns - s->known_ns : 0, half = spent / 2;
    if (s->was)
        count(s->was, half);
    if (state)
        count(state, spent - half);
    count(&s->counts.counted_ns, spent);
    s->known_ns = until_ns, s->was = state;
}

/* Asks once, and counts the time until the answer if that took long; as `timed`. */
static int asked(storm_sampler *s, wait_kind *waited) {
    int64_t began = storm_now_ns(), took;
    int answer = timed(s, &took, waited);
    if (answer >= 0 && *waited == LONG) {
        if (!answer)
            pass(s, began, NULL);
        pass(s, began + took, answer ? &s->counts.idle_ns : NULL);
    }
    return answer;
}

/* Asks again and again from a sample on, for as long as a launch can take: how many launches were in the way, and how
   often work ran out. Adds to `stops`; whether there was no error. */
static int watch(storm_sampler *s, int before, int64_t began, int64_t *stops) {
    int64_t launches = 0, spent;
    do {
        wait_kind waited;
        int now = asked(s, &waited);
        if (now < 0)
            return 0;
        launches += waited == LONG || (waited == BLOCKED && !now);
        *stops += !before && now;
        before = now;
        spent = storm_now_ns() - began;
    } while (spent < s->launch_ns);
    count(&s->counts.watched_ns, spent);
    count(&s->counts.launches, launches);
    return 1;
}

/* One sample, and the questions around it; whether there was no error. */
static int look(storm_sampler *s, uint64_t random) {
    wait_kind waited;
    int first = asked(s, &waited); /* after a sleep it is slow, whatever the lock does */
    if (first < 0)
        return 0;
    int64_t since = storm_now_ns();
    int64_t began = since + (int64_t)(random % SPIN_NS); /* away from the moment at which the lock was free */
    while (storm_now_ns() < began) {
    }
    int answer = asked(s, &waited);
    if (answer < 0)
        return 0;
    int64_t stops = !first && answer;
    if (waited != LONG) {
        pass(s, began, answer ? &s->counts.idle_ns : NULL);
        if (!watch(s, answer, began, &stops))
            return 0;
    }
    count(&s->counts.exposed_ns, storm_now_ns() - since);
    count(&s->counts.stops, stops);
    __atomic_fetch_add(&s->counts.asked, 1, __ATOMIC_RELEASE);
    return 1;
}

static void *sample(void *argument) {
    storm_sampler *s = argument;
    int32_t relaxed = 2; /* CU_STREAM_CAPTURE_MODE_RELAXED: asking must not spoil a capture that the user makes */
    if ((s->enter && s->enter(s->context)) || (s->relax && s->relax(&relaxed)))
        return NULL;
    uint64_t random = (uint64_t)storm_now_ns() | 1;
    do {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        storm_sleep_ns((long)(s->period_ns / 2 + (int64_t)(random % (uint64_t)s->period_ns)));
    } while (!__atomic_load_n(&s->stopping, __ATOMIC_ACQUIRE) && look(s, random >> 32));
    return NULL;
}

int32_t storm_sampler_open(void *ask, int32_t no, void *enter, void *relax, void *context, void *subject,
                           int64_t period_ns, int64_t launch_ns, storm_sampler **out) {
    if (!ask || period_ns < 1 || launch_ns < 1)
        return -EINVAL;
    storm_sampler *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    __extension__ s->ask = (int32_t (*)(void *))ask;
    __extension__ s->enter = (int32_t (*)(void *))enter;
    __extension__ s->relax = (int32_t (*)(int32_t *))relax;
    s->no = no, s->context = context, s->subject = subject, s->period_ns = period_ns, s->launch_ns = launch_ns;
    s->least_ns = INT64_MAX / 4;
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

void storm_sampler_read(storm_sampler *s, storm_sampler_counts *out) {
    out->watched_ns = __atomic_load_n(&s->counts.watched_ns, __ATOMIC_RELAXED);
    out->asked = __atomic_load_n(&s->counts.asked, __ATOMIC_ACQUIRE);
    out->counted_ns = __atomic_load_n(&s->counts.counted_ns, __ATOMIC_RELAXED);
    out->idle_ns = __atomic_load_n(&s->counts.idle_ns, __ATOMIC_RELAXED);
    out->launches = __atomic_load_n(&s->counts.launches, __ATOMIC_RELAXED);
    out->stops = __atomic_load_n(&s->counts.stops, __ATOMIC_RELAXED);
    out->exposed_ns = __atomic_load_n(&s->counts.exposed_ns, __ATOMIC_RELAXED);
}

void storm_sampler_close(storm_sampler *s) {
    __atomic_store_n(&s->stopping, 1, __ATOMIC_RELEASE);
    pthread_join(s->thread, NULL);
    free(s);
}
