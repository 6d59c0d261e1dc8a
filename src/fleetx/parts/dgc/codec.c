/* Deep gradient compression of one fp32 tensor in host memory. native.py calls it through ctypes. It knows neither
   Python nor torch, nor the header of a payload: only the body, which payload.py describes and decode.c reads.

   Memory traffic is the limit: u and v are read and written once, in one pass that also notes the largest |v| of every
   chunk of 64. These notes (the "tops") make an exact selection cheap, so that no threshold has to be guessed from a
   sample: if the k-th largest top is t, k elements at least are as large as t, so the k largest are in the chunks whose
   top is t or more; and those are k chunks, whatever the distribution (more only if tops are equal).

   Magnitudes are compared as integers: infinities and nan come out largest. The result does not depend on the number of
   threads. */

#include <math.h>
#include <stdlib.h>
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

#include "wire.h"

/* A copy of each inner loop for each kind of x86, as in ../optim/kernels.c. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define CLONES
#endif

#define INLINED __attribute__((always_inline)) static inline

enum {
    CHUNK = 64,        /* elements that share a top */
    BLOCK = 16384,     /* elements that one thread takes at a time */
    PASS = 1 << 16,    /* so many elements to update are worth another thread, */
    LOOK = 1 << 22,    /* and so many to look through */
    BINS = 1 << 16,
    AHEAD = 16,        /* so many places are prefetched */
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* Where cores are shared, a thread may come late by a slice of the scheduler, which is more than a small task takes. */
static inline int hands(int64_t elements, int64_t enough, int threads) {
    return (int)least(threads, 1 + elements / enough);
}

/* ---- the update -------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t n;
    const float *g, *u, *v, *p; /* p: NULL without decay */
    float *u_out, *v_out;       /* may be u and v */
    float momentum, factor, decay;
} update;

/* Inlined, so that no loop has a condition. All is read before anything is written: ../optim/kernels.c says why. */
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
#pragma omp parallel num_threads(hands(s->n, PASS, threads))
    {
        /* u of a parameter without gradients decays to denormal numbers, which are slow: let it become zero. */
#ifdef __SSE2__
        unsigned mode = _mm_getcsr();
        _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);
#endif
#pragma omp for schedule(static)
        for (int64_t start = 0; start < s->n; start += BLOCK)
            advance(s, start, least(BLOCK, s->n - start), tops + start / CHUNK);
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

/* Summed by block, then over the blocks in their order. `room`: a number for each block. */
static double norm(const float *x, int64_t n, double *room, int threads) {
#pragma omp parallel for schedule(static) num_threads(hands(n, PASS, threads))
    for (int64_t start = 0; start < n; start += BLOCK)
        room[start / BLOCK] = squares(x + start, least(BLOCK, n - start));
    double sum = 0;
    for (int64_t b = 0; b * BLOCK < n; b++) sum += room[b];
    return sqrt(sum);
}

/* ---- the selection ----------------------------------------------------------------------------------------------- */

/* Counts the magnitudes from `low` on by (magnitude - first) >> shift. */
static void tally(const void *x, int64_t start, int64_t end, uint32_t low, uint32_t first, int shift, uint32_t bins,
                  uint32_t *into) {
    for (int64_t i = start; i < end; i++) {
        uint32_t bits = magnitude_at(x, i), bin = (bits - first) >> shift;
        if (bits >= low && bin < bins) into[bin]++;
    }
}

/* The magnitude that is `rank`-th from above; 0 if not so many are `low` or more. In *larger: how many are larger than
   it. Its bits are found from the highest on: 16 and 15 of them, or where so many bins would take longer than the
   numbers, 11, 11 and 9. x: floats, or magnitudes. */
static uint32_t ranked(const void *x, int64_t n, int64_t rank, uint32_t low, int64_t *larger, int threads) {
    int width = n < LOOK / 4 ? 11 : 16, shift = 31;
    uint32_t first = 0;
    *larger = 0;
    while (shift > 0) {
        int bits = (int)least(width, shift);
        int64_t bin = ((int64_t)1 << bits) - 1;
        uint32_t into[BINS];
        shift -= bits;
        memset(into, 0, sizeof *into << bits);
#pragma omp parallel num_threads(hands(n, LOOK, threads))
        {
            uint32_t mine[BINS];
            memset(mine, 0, sizeof *mine << bits);
#pragma omp for schedule(static)
            for (int64_t start = 0; start < n; start += BLOCK)
                tally(x, start, least(start + BLOCK, n), low, first, shift, 1u << bits, mine);
#pragma omp critical
            for (int64_t i = 0; i < (int64_t)1 << bits; i++) into[i] += mine[i];
        }
        while (bin >= 0 && *larger + into[bin] < rank) *larger += into[bin--];
        if (bin < 0) return 0;
        first += (uint32_t)bin << shift;
    }
    return first;
}

/* Where few chunks are looked into, they lie far apart, and each would cost the latency of the memory. */
static inline void prefetch_chunk(const float *v, int64_t start) {
    for (int i = 0; i < CHUNK; i += 16) __builtin_prefetch(v + start + i);
}

/* Which of up to 64 are `low` or more. */
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
        mask |= (eight * 0x0102040810204080u >> 56) << i; /* gathers the lowest bits of eight bytes */
    }
    return mask;
}

/* The indices of all that are `low` or more, in order; NULL if there is no memory. */
static uint32_t *collect(const float *v, int64_t n, const uint32_t *tops, uint32_t low, int64_t *count, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK, many = 0;
    for (int64_t c = 0; c < chunks; c++) many += tops[c] >= low;
    uint32_t *list = malloc((size_t)(many + 1) * sizeof *list), *indices = NULL;
    uint64_t *masks = malloc((size_t)(many + 1) * sizeof *masks);
    *count = 0;
    if (list && masks) {
        int64_t total = 0, at = 0;
        for (int64_t c = 0; at < many; c++) {
            list[at] = (uint32_t)c;
            at += tops[c] >= low;
        }
#pragma omp parallel for schedule(static) num_threads(hands(many * CHUNK, LOOK, threads)) reduction(+ : total)
        for (int64_t i = 0; i < many; i++) {
            if (i + AHEAD < many) prefetch_chunk(v, (int64_t)list[i + AHEAD] * CHUNK);
            int64_t start = (int64_t)list[i] * CHUNK, end = least(CHUNK, n - start);
            masks[i] = mask_of(v + start, end, low);
            total += __builtin_popcountll(masks[i]);
        }
        indices = malloc((size_t)(total + 1) * sizeof *indices);
        for (int64_t i = 0; i < many && indices; i++)
            for (uint64_t mask = masks[i]; mask; mask &= mask - 1)
                indices[(*count)++] = list[i] * CHUNK + (uint32_t)__builtin_ctzll(mask);
    }
    free(list);
    free(masks);
    return indices;
}

/* The indices of the k largest, in order, without those that are less than `lowest`; NULL if there is no memory. Of
   those that are equal to the last one the first ones are taken: the others will be larger than these next time. */
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

/* ---- what is sent ------------------------------------------------------------------------------------------------ */

typedef struct {
    int half;
    float down; /* the inverse of the payload's scale */
    double up;  /* the scale */
} wire;

/* The largest half below 2^15: rounded up to 2^15, the largest float would come out as an infinity. */
#define MOST_HALF 32752.0f

/* Writes x as value number `at`; returns what stays behind, which is exact: a float less its leading 11 bits is one. */
static inline float send(wire w, uint8_t *values, int64_t at, float x) {
    if (!w.half) {
        memcpy(values + 4 * at, &x, 4);
        return 0;
    }
    float y = x * w.down;
    y = y > MOST_HALF ? MOST_HALF : y < -MOST_HALF ? -MOST_HALF : y;
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
#pragma omp parallel for schedule(static) num_threads(hands(count * CHUNK, LOOK, threads))
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

/* ---- the gaps, in Rice code -------------------------------------------------------------------------------------- */

static int64_t quotients(const uint32_t *gaps, int64_t n, int shift) {
    int64_t sum = 0;
    for (int64_t i = 0; i < n; i++) sum += gaps[i] >> shift;
    return sum;
}

/* The parameter with the fewest bits, and of several the smallest: shift + 1 a gap, and the quotients. That is convex,
   so the search goes downhill from log2 of the mean gap. In *ones: the bits of the unary part. */
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

/* Turns indices into gaps. First the low bits of all, `shift` each, then the quotients in unary: zeros and a one. */
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

/* ---- what native.py calls ---------------------------------------------------------------------------------------- */

enum { NO_MEMORY = -1 };

typedef struct {
    int64_t count, finite, shift, exponent;
} found;

/* The length of the body, which the caller has made large enough; or NO_MEMORY. norm_limit: 0 for none. */
int64_t fleetx_encode(int64_t n, const float *g, const float *u, const float *v, const float *p, float *u_out,
                      float *v_out, double momentum, double factor, double decay, double norm_limit, int64_t k,
                      int half, uint8_t *body, found *out, int threads) {
    int64_t chunks = (n + CHUNK - 1) / CHUNK, blocks = (n + BLOCK - 1) / BLOCK, length = NO_MEMORY;
    uint32_t *tops = malloc((size_t)(chunks + 1) * sizeof *tops), *indices = NULL, top = 0;
    double *sums = malloc((size_t)(blocks + 1) * sizeof *sums);
    *out = (found){.finite = 1};
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

    /* The largest lies in [2^14, 2^15) on the wire: it cannot overflow, and 38 octaves below it are not lost. */
    wire w = {.half = half};
    uint32_t lowest = 1;
    if (half) {
        int exponent = (int)(top >> 23) - 127 - 14;
        if (exponent < -112) exponent = -112;
        out->exponent = exponent;
        w.down = ldexpf(1, -exponent);
        w.up = ldexp(1, exponent);
        /* Nothing is sent that would be zero on the wire, and no denormal number. */
        lowest = magnitude(ldexpf(1, exponent < -102 ? -126 : exponent - 24));
    }
    if (k == n) {
#pragma omp parallel for schedule(static) num_threads(hands(n, PASS, threads))
        for (int64_t start = 0; start < n; start += BLOCK)
            send_all(w, body, start, v_out + start, least(BLOCK, n - start));
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

/* compiled.py compares it: a library that was built before the arguments changed must not be called. */
int fleetx_version(void) { return 2; }
