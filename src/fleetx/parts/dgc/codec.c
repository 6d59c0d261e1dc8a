/* Deep gradient compression of one fp32 tensor in host memory. native.py calls it through ctypes. It depends on neither
   Python nor torch, and writes only the body of a payload, which payload.py describes and decode.c reads.

   Memory traffic is the bottleneck: u and v are read and written once, in one pass that also records the largest |v|
   of every chunk of 64, its "top". The tops make an exact selection cheap, so no threshold has to be estimated from a
   sample: if the k-th largest top is t, at least k elements are as large as t, so the k largest are in chunks whose top
   is at least t. There are k such chunks for any distribution, or more if tops are equal.

   Magnitudes are compared as integers, so infinity and nan are the largest. The result does not depend on the number of
   threads. */

#include <math.h>
#include <stdlib.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "wire.h"

/* Compile inner loops once per x86 instruction set, as in ../../optim/kernels.c. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define CLONES
#endif

#define INLINED __attribute__((always_inline)) static inline

enum {
    CHUNK = 64,        /* elements that share a top */
    BLOCK = 16384,     /* elements per unit of work of a thread */
    PASS = 1 << 16,    /* elements to update that justify another thread */
    LOOK = 1 << 22,    /* elements to search that justify another thread */
    BINS = 1 << 16,
    AHEAD = 16,        /* prefetch distance, in items */
};

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* If cores are shared, a thread may start late by a scheduler time slice, which is longer than a small task takes. */
static inline int threads_for(int64_t elements, int64_t enough, int threads) {
    return (int)min64(threads, 1 + elements / enough);
}

/* ---- the update -------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t n;
    const float *g, *u, *v, *p; /* p: NULL without decay */
    float *u_out, *v_out;       /* may alias u and v */
    float momentum, factor, decay;
} update;

/* Inlined, so that `decays` is not tested inside the loop. Reads everything before it writes: see
   ../../optim/kernels.c. */
INLINED uint32_t advance_chunk(const update *s, int64_t start, int64_t n, int decays) {
    const float *g = s->g + start, *u = s->u + start, *v = s->v + start, *p = decays ? s->p + start : NULL;
    float *u_out = s->u_out + start, *v_out = s->v_out + start, m = s->momentum, f = s->factor, d = s->decay;
    uint32_t top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) {
        float x = m * u[i] + f * g[i];
        if (decays) x += d * p[i];
        float y = v[i] + x;
        uint32_t bits = magnitude(y);
        u_out[i] = x;
        v_out[i] = y;
        top = bits > top ? bits : top;
    }
    return top;
}

CLONES static void advance(const update *s, int64_t start, int64_t n, uint32_t *tops) {
    int64_t i = 0;
    if (s->p)
        for (; i + CHUNK <= n; i += CHUNK) tops[i / CHUNK] = advance_chunk(s, start + i, CHUNK, 1);
    else
        for (; i + CHUNK <= n; i += CHUNK) tops[i / CHUNK] = advance_chunk(s, start + i, CHUNK, 0);
    if (i < n) tops[i / CHUNK] = advance_chunk(s, start + i, n - i, s->p != NULL);
}

static void advance_all(const update *s, uint32_t *tops, int threads) {
#pragma omp parallel num_threads(threads_for(s->n, PASS, threads))
    {
        /* u decays to denormals, which are slow, if a parameter gets no gradients: flush them to zero. */
#ifdef __SSE2__
        unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);
#endif
#pragma omp for schedule(static)
        for (int64_t start = 0; start < s->n; start += BLOCK)
            advance(s, start, min64(BLOCK, s->n - start), tops + start / CHUNK);
#ifdef __SSE2__
        _mm_setcsr(mode);
#endif
    }
}

CLONES static double squares(const float *x, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        double y = x[i];
        sum += y * y;
    }
    return sum;
}

/* Sums within blocks, then over blocks in order. `room` holds one number per block. */
static double norm(const float *x, int64_t n, double *room, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(n, PASS, threads))
    for (int64_t start = 0; start < n; start += BLOCK)
        room[start / BLOCK] = squares(x + start, min64(BLOCK, n - start));
    double sum = 0;
    for (int64_t b = 0; b * BLOCK < n; b++) sum += room[b];
    return sqrt(sum);
}

/* ---- the selection ----------------------------------------------------------------------------------------------- */

/* A histogram of (magnitude - first) >> shift over magnitudes of at least `low`. */
static void tally(const void *x, int64_t start, int64_t end, uint32_t low, uint32_t first, int shift, uint32_t bins,
                  uint32_t *into) {
    for (int64_t i = start; i < end; i++) {
        uint32_t bits = magnitude_at(x, i), bin = (bits - first) >> shift;
        if (bits >= low && bin < bins) into[bin]++;
    }
}

/* The `rank`-th largest magnitude, or 0 if fewer than `rank` are at least `low`. *larger: how many are larger. Finds
   its bits from the highest down: 16 and 15 of them, or 11, 11 and 9 for few numbers, because clearing more bins would
   take longer than counting. x: floats or magnitudes. */
static uint32_t ranked(const void *x, int64_t n, int64_t rank, uint32_t low, int64_t *larger, int threads) {
    int width = n < LOOK / 4 ? 11 : 16, shift = 31;
    uint32_t first = 0;
    *larger = 0;
    while (shift > 0) {
        int bits = (int)min64(width, shift);
        int64_t bin = ((int64_t)1 << bits) - 1;
        uint32_t counts[BINS];
        shift -= bits;
        memset(counts, 0, sizeof *counts << bits);
#pragma omp parallel num_threads(threads_for(n, LOOK, threads))
        {
            uint32_t local[BINS];
            memset(local, 0, sizeof *local << bits);
#pragma omp for schedule(static)
            for (int64_t start = 0; start < n; start += BLOCK)
                tally(x, start, min64(start + BLOCK, n), low, first, shift, 1u << bits, local);
#pragma omp critical
            for (int64_t i = 0; i < (int64_t)1 << bits; i++) counts[i] += local[i];
        }
        while (bin >= 0 && *larger + counts[bin] < rank) *larger += counts[bin--];
        if (bin < 0) return 0;
        first += (uint32_t)bin << shift;
    }
    return first;
}

/* If few chunks are searched they are far apart, and each would cost a cache miss. */
static inline void prefetch_chunk(const float *v, int64_t start) {
    for (int i = 0; i < CHUNK; i += 16) __builtin_prefetch(v + start + i);
}

/* A bit mask of the elements, at most 64, that are at least `low`. */
CLONES static uint64_t mask_of(const float *v, int64_t n, uint32_t low) {
    uint8_t flags[CHUNK] = {0};
    uint64_t mask = 0;
    if (n == CHUNK)
        for (int64_t i = 0; i < CHUNK; i++) flags[i] = magnitude(v[i]) >= low;
    else
        for (int64_t i = 0; i < n; i++) flags[i] = magnitude(v[i]) >= low;
    for (int64_t i = 0; i < CHUNK; i += 8) {
        uint64_t eight;
        memcpy(&eight, flags + i, 8);
        mask |= (eight * 0x0102040810204080u >> 56) << i; /* gather the lowest bits of eight bytes */
    }
    return mask;
}

/* The sorted indices of all elements that are at least `low`; NULL if out of memory. */
static uint32_t *collect(const float *v, int64_t n, const uint32_t *tops, uint32_t low, int64_t *count, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK, matching = 0;
    for (int64_t c = 0; c < chunks; c++) matching += tops[c] >= low;
    uint32_t *list = malloc((size_t)(matching + 1) * sizeof *list), *indices = NULL;
    uint64_t *masks = malloc((size_t)(matching + 1) * sizeof *masks);
    *count = 0;
    if (list && masks) {
        int64_t total = 0, at = 0;
        for (int64_t c = 0; at < matching; c++) {
            list[at] = (uint32_t)c;
            at += tops[c] >= low;
        }
#pragma omp parallel for schedule(static) num_threads(threads_for(matching * CHUNK, LOOK, threads)) reduction(+ : total)
        for (int64_t i = 0; i < matching; i++) {
            if (i + AHEAD < matching) prefetch_chunk(v, (int64_t)list[i + AHEAD] * CHUNK);
            int64_t start = (int64_t)list[i] * CHUNK, end = min64(CHUNK, n - start);
            masks[i] = mask_of(v + start, end, low);
            total += __builtin_popcountll(masks[i]);
        }
        indices = malloc((size_t)(total + 1) * sizeof *indices);
        for (int64_t i = 0; i < matching && indices; i++)
            for (uint64_t mask = masks[i]; mask; mask &= mask - 1)
                indices[(*count)++] = list[i] * CHUNK + (uint32_t)__builtin_ctzll(mask);
    }
    free(list);
    free(masks);
    return indices;
}

/* The sorted indices of the k largest elements that are at least `lowest`; NULL if out of memory. Of elements equal to
   the k-th, those with the lowest indices are taken; the others will be sent later. */
static uint32_t *largest(const float *v, int64_t n, const uint32_t *tops, int64_t k, uint32_t lowest, int64_t *count,
                         int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK, larger, kept = 0;
    uint32_t low = k <= chunks ? ranked(tops, chunks, k, lowest, &larger, threads)
                               : ranked(v, n, k, lowest, &larger, threads);
    uint32_t *indices = collect(v, n, tops, low > lowest ? low : lowest, count, threads), *bits;
    if (!indices || *count <= k) return indices;
    bits = malloc((size_t)*count * sizeof *bits);
    if (!bits) {
        free(indices);
        return NULL;
    }
    for (int64_t i = 0; i < *count; i++) bits[i] = magnitude(v[indices[i]]);
    low = ranked(bits, *count, k, lowest, &larger, threads);
    for (int64_t i = 0, ties = k - larger; kept < k; i++) {
        indices[kept] = indices[i];
        kept += bits[i] > low || (bits[i] == low && ties-- > 0);
    }
    free(bits);
    *count = kept;
    return indices;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

typedef struct {
    int half;
    float down; /* the inverse of the payload's scale */
    double up;  /* the scale */
} wire;

/* The largest half below 2^15. If the largest float were rounded up to 2^15, it would decode to infinity. */
#define MAX_HALF 32752.0f

/* Writes x as value number `at`. Returns the rounding error, which is exact: a float minus its leading 11 bits is a
   float. */
static inline float send(wire w, uint8_t *values, int64_t at, float x) {
    if (!w.half) {
        memcpy(values + 4 * at, &x, 4);
        return 0;
    }
    float y = x * w.down;
    y = y > MAX_HALF ? MAX_HALF : y < -MAX_HALF ? -MAX_HALF : y;
    uint16_t h = to_half(y);
    memcpy(values + 2 * at, &h, 2);
    return (float)(x - from_half(h, w.up));
}

CLONES static void send_all(wire w, uint8_t *values, int64_t start, float *v, int64_t n) {
    if (w.half)
        for (int64_t i = 0; i < n; i++) v[i] = send((wire){1, w.down, w.up}, values, start + i, v[i]);
    else
        for (int64_t i = 0; i < n; i++) v[i] = send((wire){0}, values, start + i, v[i]);
}

static void send_some(wire w, uint8_t *values, const uint32_t *indices, int64_t count, float *u, float *v,
                      int threads) {
#pragma omp parallel for schedule(static) num_threads(threads_for(count * CHUNK, LOOK, threads))
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            __builtin_prefetch(u + indices[i + AHEAD], 1);
            __builtin_prefetch(v + indices[i + AHEAD], 1);
        }
        float *x = v + indices[i];
        *x = send(w, values, i, *x);
        u[indices[i]] = 0;
    }
}

/* ---- indices: gaps in Rice code ---------------------------------------------------------------------------------- */

static int64_t quotients(const uint32_t *gaps, int64_t n, int shift) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += gaps[i] >> shift;
    return sum;
}

/* The smallest parameter with the fewest bits in total: shift + 1 per gap, plus the quotients. The total is convex in
   the parameter, so the search goes downhill from log2 of the mean gap. *ones: number of bits of the unary part. */
static int best_shift(const uint32_t *gaps, int64_t n, int64_t *ones) {
    int64_t all = quotients(gaps, n, 0), sum, other;
    int shift = 0;
    while (shift < 31 && all >> (shift + 1) >= n) shift++;
    int start = shift;
    sum = quotients(gaps, n, shift);
    while (shift > 0 && (other = quotients(gaps, n, shift - 1)) - n <= sum) shift--, sum = other;
    if (shift == start)
        while (shift < 31 && (other = quotients(gaps, n, shift + 1)) + n < sum) shift++, sum = other;
    *ones = sum + n;
    return shift;
}

/* Overwrites the indices with their gaps. Writes the low `shift` bits of all gaps, then the quotients in unary: zeros,
   then a one. */
static uint8_t *write_indices(uint8_t *to, uint32_t *gaps, int64_t n, int *shift) {
    for (int64_t i = n - 1; i > 0; i--) gaps[i] -= gaps[i - 1] + 1;
    int64_t ones;
    *shift = best_shift(gaps, n, &ones);
    uint64_t held = 0, mask = ((uint64_t)1 << *shift) - 1;
    int bits = 0;
    for (int64_t i = 0; i < n && *shift; i++) {
        held |= (gaps[i] & mask) << bits;
        bits += *shift;
        if (bits < 32) continue;
        memcpy(to, &held, 4);
        to += 4;
        held >>= 32;
        bits -= 32;
    }
    for (; bits > 0; bits -= 8, held >>= 8) *to++ = (uint8_t)held;
    int64_t bytes = (ones + 7) / 8, at = 0;
    memset(to, 0, (size_t)bytes);
    for (int64_t i = 0; i < n; i++, at++) {
        at += gaps[i] >> *shift;
        to[at >> 3] |= (uint8_t)(1 << (at & 7));
    }
    return to + bytes;
}

/* ---- called by native.py ----------------------------------------------------------------------------------------- */

enum { NO_MEMORY = -1 };

typedef struct {
    int64_t count, finite, shift, exponent;
} result;

/* Returns the length of the body, for which the caller has allocated enough, or NO_MEMORY. norm_limit: 0 for none. */
int64_t fleetx_encode(int64_t n, const float *g, const float *u, const float *v, const float *p, float *u_out,
                      float *v_out, double momentum, double factor, double decay, double norm_limit, int64_t k,
                      int half, uint8_t *body, result *out, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK, blocks = (n + BLOCK - 1) / BLOCK, length = NO_MEMORY;
    uint32_t *tops = malloc((size_t)(chunks + 1) * sizeof *tops), *indices = NULL, top = 0;
    double *sums = malloc((size_t)(blocks + 1) * sizeof *sums);
    *out = (result){.finite = 1};
    if (!tops || !sums) goto end;

    if (norm_limit > 0) {
        double size = fabs(factor) * norm(g, n, sums, threads);
        if (size > norm_limit && isfinite(size)) factor *= norm_limit / size;
    }
    update s = {n, g, u, v, p, u_out, v_out, (float)momentum, (float)factor, (float)decay};
    advance_all(&s, tops, threads);
    for (int64_t c = 0; c < chunks; c++) top = tops[c] > top ? tops[c] : top;
    length = 0;
    if (top >= NOT_FINITE) {
        out->finite = 0;
        goto end;
    }

    /* Scale the largest to [2^14, 2^15): it cannot overflow, and values down to 2^-38 of it are kept. */
    wire w = {.half = half};
    uint32_t lowest = 1;
    if (half) {
        int exponent = (int)(top >> 23) - 127 - 14;
        if (exponent < -112) exponent = -112;
        out->exponent = exponent;
        w.down = ldexpf(1, -exponent);
        w.up = ldexp(1, exponent);
        /* Skip values that would be rounded to zero, and denormals. */
        lowest = magnitude(ldexpf(1, exponent < -102 ? -126 : exponent - 24));
    }
    if (k == n) {
#pragma omp parallel for schedule(static) num_threads(threads_for(n, PASS, threads))
        for (int64_t start = 0; start < n; start += BLOCK)
            send_all(w, body, start, v_out + start, min64(BLOCK, n - start));
        out->count = n;
        length = n * (half ? 2 : 4);
        goto end;
    }
    indices = largest(v_out, n, tops, k, lowest, &out->count, threads);
    if (!indices) {
        length = NO_MEMORY;
        goto end;
    }
    send_some(w, body, indices, out->count, u_out, v_out, threads);
    if (out->count) {
        int shift;
        length = write_indices(body + out->count * (half ? 2 : 4), indices, out->count, &shift) - body;
        out->shift = shift;
    }
end:
    free(tops);
    free(sums);
    free(indices);
    return length;
}

/* compiled.py checks this to avoid calling a library that was built before the arguments changed. */
int fleetx_version(void) { return 2; }
