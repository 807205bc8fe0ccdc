/* The update of adamw.h, compiled once per instruction set: included with
 *   STORM_TARGET   the function attribute that selects the instruction set
 *   STORM_NAME(x)  x with a suffix of its own
 * and left to the vectoriser. Intrinsics would be one file per instruction set, each to be proven equal to the others;
 * a plain loop over IEEE operations is equal by construction, and measured as fast, because memory is the limit.
 * Branches are written as selects of computed values, so that the loop has none. */

STORM_TARGET static inline float STORM_NAME(from_bits)(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

STORM_TARGET static inline uint32_t STORM_NAME(to_bits)(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The CPUs have instructions for fp16, but compilers do not yet use them in a plain loop: gcc 12 falls back to one element
 * at a time, and these few integer operations in vectors are faster.
 *
 * fp16 to float, exact. A subnormal is its mantissa times 2^-24: put under the exponent of 2^-14 and 2^-14 taken off. */
STORM_TARGET static inline float STORM_NAME(widen_half)(uint16_t half) {
    uint32_t magnitude = ((uint32_t)half & 0x7fffu) << 13;
    uint32_t normal = magnitude + (magnitude >= (31u << 23) ? 224u << 23 : 112u << 23);
    uint32_t subnormal = STORM_NAME(to_bits)(STORM_NAME(from_bits)(magnitude + (113u << 23)) - 0x1p-14f);
    uint32_t bits = magnitude < (1u << 23) ? subnormal : normal;
    return STORM_NAME(from_bits)(bits | ((uint32_t)half & 0x8000u) << 16);
}

/* float to fp16, to nearest even. Results below 2^-14 are rounded by the adder: 0.5 has its last bit at 2^-24. */
STORM_TARGET static inline uint16_t STORM_NAME(narrow_half)(float value) {
    uint32_t bits = STORM_NAME(to_bits)(value);
    uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = STORM_NAME(to_bits)(STORM_NAME(from_bits)(magnitude) + 0.5f) - (126u << 23);
    uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half; /* 65520 and above */
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

STORM_TARGET static inline float STORM_NAME(load_grad)(const void *grad, int64_t i, uint32_t kind) {
    switch (kind) {
    case STORM_GRAD_BF16:
        return STORM_NAME(from_bits)((uint32_t)((const uint16_t *)grad)[i] << 16);
    case STORM_GRAD_FP16:
        return STORM_NAME(widen_half)(((const uint16_t *)grad)[i]);
    default:
        return ((const float *)grad)[i];
    }
}

STORM_TARGET static inline float STORM_NAME(load_master)(const void *weight, const void *master, int64_t i,
                                                         uint32_t kind) {
    switch (kind) {
    case STORM_BF16_SPLIT: {
        uint32_t high = (uint32_t)((const uint16_t *)weight)[i] << 16;
        int32_t low = ((const int16_t *)master)[i];
        return STORM_NAME(from_bits)(high + (uint32_t)low);
    }
    case STORM_FP16_IMAGE:
        return ((const float *)master)[i];
    default:
        return ((const float *)weight)[i];
    }
}

STORM_TARGET static inline void STORM_NAME(store_master)(float value, void *weight, void *master, int64_t i,
                                                         uint32_t kind) {
    switch (kind) {
    case STORM_BF16_SPLIT: {
        uint32_t bits = STORM_NAME(to_bits)(value);
        bits = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc00000u : bits;
        uint32_t high = (bits + 0x8000u) >> 16;
        ((uint16_t *)weight)[i] = (uint16_t)high;
        ((int16_t *)master)[i] = (int16_t)(uint16_t)(bits & 0xffffu); /* the same 16 bits as bits - (high << 16) */
        break;
    }
    case STORM_FP16_IMAGE:
        ((uint16_t *)weight)[i] = STORM_NAME(narrow_half)(value);
        ((float *)master)[i] = value;
        break;
    default:
        ((float *)weight)[i] = value;
    }
}

/* `weight_kind`, `grad_kind` and `flags` are constants wherever this is inlined. */
STORM_TARGET static inline __attribute__((always_inline)) void
STORM_NAME(update)(const storm_scalars s, void *restrict weight, void *restrict master, float *restrict exp_avg,
                   float *restrict exp_avg_sq, const void *restrict grad, int64_t count, uint32_t weight_kind,
                   uint32_t grad_kind, uint32_t flags) {
    STORM_INDEPENDENT
    for (int64_t i = 0; i < count; i++) {
        float g = STORM_NAME(load_grad)(grad, i, grad_kind) * s.grad_scale;
        float p = STORM_NAME(load_master)(weight, master, i, weight_kind);
        if (flags & STORM_L2)
            g = __builtin_fmaf(p, s.l2, g);
        p = p * s.decay;
        float m = exp_avg[i];
        m = __builtin_fmaf(s.lerp_weight, g - m, flags & STORM_FROM_GRAD ? g : m);
        float v = exp_avg_sq[i];
        float square = s.grad_sq_weight * g;
        v = flags & STORM_SQUARE_FUSED ? __builtin_fmaf(square, g, v * s.beta2)
                                       : __builtin_fmaf(v, s.beta2, square * g);
        float d = __builtin_sqrtf(v) / s.root_bias2 + s.eps;
        p = p + (s.minus_step_size * m) / d;
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        STORM_NAME(store_master)(p, weight, master, i, weight_kind);
    }
}

/* One function per pair of kinds. Flags are taken apart here, outside the loop, into the cases that occur: beta1 <= 0.5
 * and L2 are rare and share one loop per placement of the fma with selects in it. */
#define STORM_KERNEL(weight_kind, grad_kind, weight_bytes, master_bytes, grad_bytes)                                   \
    STORM_TARGET static void STORM_NAME(kernel_##weight_kind##_##grad_kind)(const storm_update *u, int64_t first,      \
                                                                            int64_t last) {                           \
        char *weight = (char *)u->weight + first * (weight_bytes);                                                     \
        char *master = (char *)u->master + first * (master_bytes);                                                     \
        const char *grad = (const char *)u->grad + first * (grad_bytes);                                               \
        float *exp_avg = u->exp_avg + first, *exp_avg_sq = u->exp_avg_sq + first;                                      \
        const uint32_t flags = u->scalars.flags;                                                                       \
        if (flags == STORM_SQUARE_FUSED)                                                                               \
            STORM_NAME(update)(u->scalars, weight, master, exp_avg, exp_avg_sq, grad, last - first, weight_kind,       \
                               grad_kind, STORM_SQUARE_FUSED);                                                         \
        else if (flags == 0)                                                                                           \
            STORM_NAME(update)(u->scalars, weight, master, exp_avg, exp_avg_sq, grad, last - first, weight_kind,       \
                               grad_kind, 0);                                                                          \
        else                                                                                                           \
            STORM_NAME(update)(u->scalars, weight, master, exp_avg, exp_avg_sq, grad, last - first, weight_kind,       \
                               grad_kind, flags);                                                                      \
    }

STORM_KERNEL(0, 0, 4, 0, 4)
STORM_KERNEL(0, 1, 4, 0, 2)
STORM_KERNEL(0, 2, 4, 0, 2)
STORM_KERNEL(1, 0, 2, 2, 4)
STORM_KERNEL(1, 1, 2, 2, 2)
STORM_KERNEL(1, 2, 2, 2, 2)
STORM_KERNEL(2, 0, 2, 4, 4)
STORM_KERNEL(2, 1, 2, 4, 2)
STORM_KERNEL(2, 2, 2, 4, 2)
#undef STORM_KERNEL

static storm_kernel *const STORM_NAME(kernels)[STORM_WEIGHT_KINDS][STORM_GRAD_KINDS] = {
    {STORM_NAME(kernel_0_0), STORM_NAME(kernel_0_1), STORM_NAME(kernel_0_2)},
    {STORM_NAME(kernel_1_0), STORM_NAME(kernel_1_1), STORM_NAME(kernel_1_2)},
    {STORM_NAME(kernel_2_0), STORM_NAME(kernel_2_1), STORM_NAME(kernel_2_2)},
};
