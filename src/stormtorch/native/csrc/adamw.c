/* Compiles adamw_body.h for each instruction set, picks one at run time, and runs an update to its end on a few threads. */
#define _GNU_SOURCE
#include <errno.h>
#include <fenv.h>
#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

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

/* Elements whose new values fit into the first cache together. */
enum { TILE = 1024 };

/* Copies to memory that nobody reads soon: past the caches where that is possible, which otherwise read it first. */
static void copy_out(void *to, const void *from, size_t bytes) {
#if defined(__x86_64__)
    if (((uintptr_t)to | (uintptr_t)from | bytes) % sizeof(__m128i) == 0) {
        for (size_t at = 0; at < bytes; at += sizeof(__m128i))
            _mm_stream_si128((__m128i *)((char *)to + at), _mm_load_si128((const __m128i *)((const char *)from + at)));
        return;
    }
#endif
    memcpy(to, from, bytes);
}

void storm_run(const storm_update *update, storm_kernel *kernel, int64_t first, int64_t last) {
    static const int64_t weight_bytes[] = {4, 2, 2}, master_bytes[] = {0, 2, 4}, grad_bytes[] = {4, 2, 2}; /* by kind */
    enum { PARTS = 4 };
    _Alignas(64) char tile[PARTS][4 * TILE];
    const int64_t sizes[PARTS] = {weight_bytes[update->weight_kind], master_bytes[update->weight_kind], 4, 4};
    char *const to[PARTS] = {update->weight, update->master, (char *)update->exp_avg, (char *)update->exp_avg_sq};
    const char *const from[PARTS] = {update->weight_from, update->master_from, update->exp_avg_from,
                                     update->exp_avg_sq_from};
    if (!update->weight_from) {
        kernel(update, first, last);
        return;
    }
    storm_update here = *update;
    here.weight = tile[0], here.master = tile[1], here.exp_avg = (float *)tile[2], here.exp_avg_sq = (float *)tile[3];
    for (int64_t at = first; at < last; at += TILE) {
        int64_t count = at + TILE < last ? TILE : last - at;
        for (int part = 0; part < PARTS; part++)
            if (from[part])
                memcpy(tile[part], from[part] + at * sizes[part], (size_t)(count * sizes[part]));
        if (update->grad) {
            here.grad = (const char *)update->grad + at * grad_bytes[update->grad_kind];
            kernel(&here, 0, count);
        }
        for (int part = 0; part < PARTS; part++)
            if (from[part])
                copy_out(to[part] + at * sizes[part], tile[part], (size_t)(count * sizes[part]));
    }
#if defined(__x86_64__)
    _mm_sfence(); /* what follows, a flag, must not overtake them */
#endif
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
