/* Flag words: compared cyclically, and never moved backwards. */
#ifndef STORM_FLAGS_H
#define STORM_FLAGS_H

#include "storm.h"

static inline int storm_reached(storm_flag flag) {
    return (int32_t)(__atomic_load_n(flag.address, __ATOMIC_ACQUIRE) - flag.value) >= 0;
}

/* Stores the value unless the word has already reached it. Jobs that share a done word are not over in the order of their
 * values, least of all when some are abandoned: a plain store would take back what a waiting GPU is still to see. */
static inline void storm_advance(storm_flag flag) {
    uint32_t seen = __atomic_load_n(flag.address, __ATOMIC_RELAXED);
    while ((int32_t)(seen - flag.value) < 0 &&
           !__atomic_compare_exchange_n(flag.address, &seen, flag.value, 1, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
        ;
}

#endif
