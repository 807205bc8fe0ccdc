/* AdamW and Adam in one pass over memory: the specification.
 *
 * Every implementation of this update (this library under each instruction set, a GPU kernel) must give the same bits, so
 * that an element may be updated anywhere. Hence one fixed order of IEEE single-precision operations, each rounded to
 * nearest even, no flushing of subnormals, no contraction other than the fma written here. fma(a, b, c) is a*b + c
 * rounded once; all others are rounded each by itself.
 *
 *   scalars of the step, computed in double as torch does, then rounded to float once:
 *     grad_scale      given factor for gradients, negated to maximize        (1.0: the gradient itself);
 *                     where there is a grad_factor, grad_scale = grad_scale * grad_factor, one operation in float
 *     l2              weight_decay                                           (Adam with weight_decay != 0: flag L2)
 *     decay           1 - lr * weight_decay for AdamW, else 1.0
 *     lerp_weight     1 - beta1 where float(1 - beta1) < 0.5; otherwise float(1 - beta1) - 1 and flag FROM_GRAD
 *     beta2           beta2
 *     grad_sq_weight  1 - beta2
 *     root_bias2      sqrt(1 - beta2^step)
 *     eps             eps
 *     minus_step_size -(lr / (1 - beta1^step))
 *
 *   one element, gradient G, first moment M, second moment V, master weight P, all float:
 *     g  = G * grad_scale
 *     g  = fma(P, l2, g)                     only with L2
 *     p  = P * decay
 *     m  = fma(lerp_weight, g - M, B)        B is g with FROM_GRAD, otherwise M
 *     s  = grad_sq_weight * g
 *     v  = fma(s, g, V * beta2)              with SQUARE_FUSED
 *     v  = fma(V, beta2, s * g)              without
 *     d  = sqrt(v) / root_bias2 + eps
 *     p  = p + (minus_step_size * m) / d
 *     M, V, P = m, v, p
 *
 * A NaN may come out with any payload and sign; that it is a NaN is specified, its bits are not.
 *
 * The placement of the fma is not ours. It is what gcc makes of torch's CPU kernels (2.11 to 2.13), and with it fp32 Adam
 * and AdamW equal torch.optim bit for bit, which is what users compare us with. Only one of them varies, hence
 * SQUARE_FUSED: the host says once which it wants (update.py does) and every kernel obeys, whatever it runs on.
 *   fused=True         gcc decides per architecture: on x86-64 the square of the gradient is fused into v, on aarch64 the
 *                      old moment. The last numel % 8 elements of a tensor on x86-64 go through a scalar loop of torch's
 *                      that uses the other one.
 *   fused=False        the loop over torch operations, the default for CPU tensors: V * beta2 is an operation by itself
 *                      (mul_), so the square is what addcmul_ fuses. Every other operation is as above: add with alpha
 *                      and lerp_ are one fma each, addcdiv_ is none. On aarch64 this holds for every element, tails
 *                      included. On x86-64 torch's sqrt is not rounded to nearest and equality cannot be had.
 *
 * The road not taken: one division by (sqrt(v) + eps'), the bias corrections folded into the scalars. It saves a
 * division that mostly hides behind memory traffic, and gives up the equality.
 *
 * How the master weight P is kept (weight_kind):
 *
 *   STORM_FP32        weight is P. master is unused.
 *
 *   STORM_BF16_SPLIT  weight is hi, the bf16 image; master is lo, a signed 16-bit remainder:
 *                         bits(P) = (hi << 16) + lo            modulo 2^32
 *                         hi      = (bits(P) + 0x8000) >> 16
 *                         lo      = bits(P) - (hi << 16)
 *                     This is exact for every finite P and both infinities; a finite P within half a step of the largest
 *                     has hi = Inf, lo < 0 and still comes back. hi is P rounded to nearest with ties away from zero.
 *                     Ties to even cannot be had: 65537 values would then share one even hi, one more than lo can tell
 *                     apart. A NaN is stored as hi = 0x7fc0, lo = 0; without that rule the carry turns some into -0.
 *
 *   STORM_FP16_IMAGE  weight is P rounded to fp16, to nearest even, with subnormals, Inf on overflow, and some quiet NaN
 *                     for a NaN; it is only written. master is P itself, 4 bytes: a 16-bit remainder could not be exact
 *                     where fp16 is subnormal or overflows.
 *
 * Gradients (grad_kind) are float, bf16 or fp16, widened exactly. */
#ifndef STORM_ADAMW_H
#define STORM_ADAMW_H

#include <stddef.h>
#include <stdint.h>

enum { STORM_FP32 = 0, STORM_BF16_SPLIT = 1, STORM_FP16_IMAGE = 2, STORM_WEIGHT_KINDS = 3 };
enum { STORM_GRAD_FP32 = 0, STORM_GRAD_BF16 = 1, STORM_GRAD_FP16 = 2, STORM_GRAD_KINDS = 3 };
enum { STORM_L2 = 1, STORM_FROM_GRAD = 2, STORM_SQUARE_FUSED = 4 };

typedef struct {
    float grad_scale, l2, decay, lerp_weight, beta2, grad_sq_weight, root_bias2, eps, minus_step_size;
    uint32_t flags;
} storm_scalars;

/* `count` elements from each address on. The ranges must not overlap. `from`: where weight, master and both moments are
 * read, if not NULL; then nothing is changed in place. Without a gradient, they are only copied. */
typedef struct {
    void *weight;
    void *master;
    float *exp_avg;
    float *exp_avg_sq;
    const void *grad;
    const float *grad_factor; /* one element, or NULL for none; read when the update begins, not before */
    int64_t count;
    uint32_t weight_kind;
    uint32_t grad_kind;
    storm_scalars scalars;
    const void *weight_from, *master_from, *exp_avg_from, *exp_avg_sq_from;
} storm_update;

/* Multiplies the factor into grad_scale and forgets its address: every element then sees the same one. The code that
 * runs an update does this to its own copy, once, before the first element; kernels do not look at the factor. */
static inline void storm_read_factor(storm_update *update) {
    if (update->grad_factor)
        update->scalars.grad_scale *= *update->grad_factor;
    update->grad_factor = NULL;
}

/* Updates elements [first, last) on the calling thread, under its present floating-point environment. */
typedef void storm_kernel(const storm_update *update, int64_t first, int64_t last);

/* Runs elements [first, last) of an update with its kernel, in place or into other memory. */
void storm_run(const storm_update *update, storm_kernel *kernel, int64_t first, int64_t last);

/* The kernel for a checked update; NULL where this CPU lacks the instruction set or a kind is unknown. */
storm_kernel *storm_find_kernel(const storm_update *update, int32_t isa);

/* Work is handed out in runs of this many elements: long enough that a lock between two of them costs nothing (about
 * 0.1 ms), short enough that an urgent job waits no longer than that. A multiple of every vector and page length. */
#define STORM_CHUNK ((int64_t)32768)

#endif
