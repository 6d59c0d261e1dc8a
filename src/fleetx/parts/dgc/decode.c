/* Adds a payload to a tensor. The body comes from the network, so no bytes in it may cause a read beyond the body or a
   write beyond the tensor. */

#include <math.h>

#include "wire.h"

enum { BATCH = 64 };
enum { SHORT = -2, LONG = -3, BEYOND = -4, BAD_VALUE = -5 };

static uint64_t read_word(const uint8_t *from, const uint8_t *end) {
    uint64_t word = 0;
    if (end - from >= 8)
        memcpy(&word, from, 8);
    else if (from < end)
        memcpy(&word, from, (size_t)(end - from));
    return word;
}

/* The product of two floats is exact in double, so a fused multiply-add rounds like two operations. Every processor,
   and plain.py, gets the same bits; otherwise the parameters of the ranks would drift apart. */
static inline float added(float to, double scale, double value) { return (float)(to + scale * value); }

typedef struct {
    int half;
    double up;
    const uint8_t *values;
} reader;

static inline double value(const reader *r, int64_t at, int *bad) {
    if (r->half) {
        uint16_t h;
        memcpy(&h, r->values + 2 * at, 2);
        *bad |= (h & 0x7c00) == 0x7c00;
        return from_half(h, r->up);
    }
    float x;
    memcpy(&x, r->values + 4 * at, 4);
    *bad |= magnitude(x) >= NOT_FINITE;
    return x;
}

static int add_all(const reader *r, int64_t n, float *out, float scale, int writes, int threads) {
    int bad = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : bad)
    for (int64_t i = 0; i < n; i++) {
        double x = value(r, i, &bad);
        if (writes) out[i] = added(out[i], scale, x);
    }
    return bad ? BAD_VALUE : 0;
}

static int add_some(const reader *r, int64_t count, const uint8_t *lows, const uint8_t *unary, const uint8_t *end,
                    int shift, int64_t n, float *out, float scale, int writes) {
    int64_t index = -1, at = 0, bits = 8 * (end - unary), indices[BATCH];
    uint64_t mask = ((uint64_t)1 << shift) - 1;
    int bad = 0;
    for (int64_t i = 0; i < count; i++, at++) {
        int64_t from = at;
        uint64_t word;
        /* At least 56 bits of a word remain after the shift; the last word is padded with zeros. */
        while ((word = read_word(unary + (at >> 3), end) >> (at & 7)) == 0) {
            at = ((at >> 3) + 8) * 8;
            if (at >= bits) return SHORT;
        }
        at += __builtin_ctzll(word);
        int64_t quotient = at - from, low = (i * shift) & 7;
        if (quotient > n >> shift) return BEYOND;
        index += 1 + (quotient << shift) + (int64_t)((read_word(lows + (i * shift >> 3), end) >> low) & mask);
        if (index >= n) return BEYOND;
        if (!writes) {
            value(r, i, &bad);
            continue;
        }
        /* The elements are far apart: prefetch a batch of them. */
        __builtin_prefetch(out + index, 1);
        indices[i % BATCH] = index;
        if (i % BATCH == BATCH - 1 || i == count - 1)
            for (int64_t j = i - i % BATCH; j <= i; j++) {
                float *to = out + indices[j % BATCH];
                *to = added(*to, scale, value(r, j, &bad));
            }
    }
    if (bad) return BAD_VALUE;
    return bits - at >= 8 ? LONG : 0;
}

/* Returns 0, or an error code if fleetx_encode cannot have written this body; then `out` is unchanged. The caller has
   checked that the values and the low bits fit into the body. */
int fleetx_decode_add(const uint8_t *body, int64_t length, int64_t count, int half, int dense, int shift, int exponent,
                      float *out, int64_t n, double scale, int threads) {
    reader r = {half, ldexp(1, exponent), body};
    const uint8_t *lows = body + count * (half ? 2 : 4), *unary = lows + (count * shift + 7) / 8;
    for (int writes = 0; writes < 2; writes++) {
        int failed = dense ? add_all(&r, n, out, (float)scale, writes, threads)
                           : add_some(&r, count, lows, unary, body + length, shift, n, out, (float)scale, writes);
        if (failed) return failed;
    }
    return 0;
}
