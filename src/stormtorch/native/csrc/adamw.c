/* Compiles adamw_body.h for each instruction set, picks one at run time, and runs an update to its end on a few threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <string.h>

#include "storm.h"

/* The body's pointers never overlap; without this each loop is preceded by ten range checks. */
#if defined(__clang__)
#define STORM_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__)
#define STORM_INDEPENDENT _Pragma("GCC ivdep")
#else
#define STORM_INDEPENDENT
#endif

#define STORM_TARGET
#define STORM_NAME(x) x##_plain
#include "adamw_body.h"
#undef STORM_TARGET
#undef STORM_NAME

#if defined(__x86_64__)
#define STORM_TARGET __attribute__((target("avx2,fma")))
#define STORM_NAME(x) x##_avx2
#include "adamw_body.h"
#undef STORM_TARGET
#undef STORM_NAME

/* gcc otherwise prefers 256-bit vectors even here. clang has no such attribute, and no such preference. */
#if defined(__clang__)
#define STORM_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")))
#else
#define STORM_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#endif
#define STORM_NAME(x) x##_avx512
#include "adamw_body.h"
#undef STORM_TARGET
#undef STORM_NAME
#endif

static const struct {
    const char *name;
    storm_kernel *const (*kernels)[STORM_GRAD_KINDS];
} isas[] = {
#if defined(__x86_64__)
    {"plain", kernels_plain},
    {"avx2", kernels_avx2},
    {"avx512", kernels_avx512},
#elif defined(__aarch64__)
    {"neon", kernels_plain}, /* every aarch64 has NEON and its fma: the plain build is the vector build */
#else
    {"plain", kernels_plain},
#endif
};

enum { ISA_COUNT = sizeof isas / sizeof isas[0] };

int32_t storm_isa_count(void) { return ISA_COUNT; }

const char *storm_isa_name(int32_t isa) { return isa >= 0 && isa < ISA_COUNT ? isas[isa].name : NULL; }

int32_t storm_isa_supported(int32_t isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (isa == 1)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (isa == 2)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
#endif
    return isa == 0;
}

int32_t storm_isa_best(void) {
    int32_t best = ISA_COUNT - 1;
    while (!storm_isa_supported(best))
        best--;
    return best;
}

storm_kernel *storm_find_kernel(const storm_update *update, int32_t isa) {
    if (isa < 0 || isa >= ISA_COUNT || !storm_isa_supported(isa) || update->count < 0 ||
        update->weight_kind >= STORM_WEIGHT_KINDS || update->grad_kind >= STORM_GRAD_KINDS)
        return NULL;
    return isas[isa].kernels[update->weight_kind][update->grad_kind];
}

static void bring(void *to, const void *from, int64_t first, int64_t last, int64_t size) {
    if (from && size)
        memcpy((char *)to + first * size, (const char *)from + first * size, (size_t)((last - first) * size));
}

void storm_run(const storm_update *update, storm_kernel *kernel, int64_t first, int64_t last) {
    static const int64_t weight_bytes[] = {4, 2, 2}, master_bytes[] = {0, 2, 4}; /* by kind */
    bring(update->weight, update->weight_from, first, last, weight_bytes[update->weight_kind]);
    bring(update->master, update->master_from, first, last, master_bytes[update->weight_kind]);
    bring(update->exp_avg, update->exp_avg_from, first, last, 4);
    bring(update->exp_avg_sq, update->exp_avg_sq_from, first, last, 4);
    if (update->grad)
        kernel(update, first, last);
}

uint32_t storm_abi(void) { return STORM_ABI; }

size_t storm_update_size(void) { return sizeof(storm_update); }

/* Some platforms need this symbol at build time. Python never imports the library, so it returns nothing. */
STORM_API void *PyInit__storm(void);
void *PyInit__storm(void) { return NULL; }

typedef struct {
    const storm_update *update;
    storm_kernel *kernel;
    int64_t next; /* first element that no thread has taken; atomic */
} range;

static void *run_chunks(void *argument) {
    range *r = argument;
    for (;;) {
        int64_t first = __atomic_fetch_add(&r->next, STORM_CHUNK, __ATOMIC_RELAXED);
        if (first >= r->update->count)
            break;
        int64_t last = first + STORM_CHUNK;
        storm_run(r->update, r->kernel, first, last < r->update->count ? last : r->update->count);
    }
    return NULL;
}

int32_t storm_adamw(const storm_update *update, int32_t isa, int32_t threads) {
    enum { MOST = 64 };
    storm_update begun = *update;
    range r = {&begun, storm_find_kernel(update, isa), 0};
    if (!r.kernel || threads < 1)
        return -EINVAL;
    fenv_t before;
    /* Torch can switch a thread, and with it every thread it starts, to flushing subnormals; the specification does not. */
    fegetenv(&before);
    fesetenv(FE_DFL_ENV);
    storm_read_factor(&begun);
    pthread_t others[MOST];
    int32_t started = 0;
    /* A thread costs about as much as eight chunks; one that cannot be had is no error, the rest do its work. */
    int64_t useful = update->count / (8 * STORM_CHUNK);
    while (started < threads - 1 && started < MOST && started < useful &&
           pthread_create(&others[started], NULL, run_chunks, &r) == 0)
        started++;
    run_chunks(&r);
    for (int32_t i = 0; i < started; i++)
        pthread_join(others[i], NULL);
    fesetenv(&before);
    return 0;
}
