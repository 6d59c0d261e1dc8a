/* LARS and LAMB for lists of fp32 tensors in host memory, without Python or torch. native.py calls this through ctypes.

   Memory bandwidth is the bottleneck, so the code is organised around memory accesses, not arithmetic:

   - Both optimizers need the norms of a whole tensor before its first element may change, hence two passes. They run
     over groups of tensors that fit in the cache, which also saves a barrier per small tensor. The second pass goes
     backwards, so that a thread starts with the data it used last. A tensor that does not fit is a group of its own;
     at least its tail is still in the cache.
   - LAMB's second pass needs the direction u again. As much of it as fits in the scratch memory is kept: what a thread
     computed last, which is still in the cache. The rest is recomputed from p, m and v, with the same bits.
   - A tensor whose step needs no norm is finished in the first pass.

   The result does not depend on the number of threads: norms are summed per block of fixed size, then over the blocks
   in order. Sums are in double, where the square of a float is exact. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <xmmintrin.h>
#endif

/* One version of each inner loop per x86 instruction set, chosen when the library is loaded. Needs gcc and glibc.
   "fma" rather than "avx2", which would not use fused multiply-add. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define CLONES
#endif

enum {
    BLOCK = 16384,      /* elements that a thread processes at a time */
    SPAN = 8,           /* blocks that the second pass processes at a time */
    GROUP = 512 * 1024, /* elements in a group: 8 MB with four arrays */
};
enum { FIRST = 1, SECOND = 2 };

/* ---- inner loops ----------------------------------------------------------------------------------------------------

   They read everything before they write, and are vectorised by `omp simd` rather than `restrict`, which lets gcc move
   reads after writes. Large tensors start at the same offset in a page, and a processor that compares only the lower
   bits of addresses mistakes a read of v[i] after a write of m[i] for a read of m[i], and stalls: LAMB's loops took up
   to 50% longer. */

CLONES static void lars_norms(const float *p, const float *g, int64_t n, double *norms) {
    double pp = 0, gg = 0;
#pragma omp simd reduction(+ : pp, gg)
    for (int64_t i = 0; i < n; i++) {
        double w = p[i], d = g[i];
        pp += w * w;
        gg += d * d;
    }
    norms[0] = pp;
    norms[1] = gg;
}

/* d = a g + b p, with the local rate and the sign in a and b */
CLONES static void lars_apply(float *p, const float *g, float *v, int64_t n, float a, float b,
                              float momentum, int nesterov) {
    if (nesterov) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float w = p[i], d = a * g[i] + b * w, x = momentum * v[i] + d;
            v[i] = x;
            p[i] = w - (d + momentum * x);
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            float w = p[i], x = momentum * v[i] + (a * g[i] + b * w);
            v[i] = x;
            p[i] = w - x;
        }
    }
}

/* The scalars of LAMB's loops. first1 = 1 - beta1 with a sign; unbias1 = 1 / (1 - beta1^t). */
typedef struct {
    float beta1, first1, unbias1, beta2, first2, unbias2, epsilon, decay;
} lamb_numbers;

static inline float lamb_u(lamb_numbers c, float p, float m, float v) {
    return m * c.unbias1 / (sqrtf(v * c.unbias2) + c.epsilon) + c.decay * p;
}

CLONES static void lamb_moments(const float *p, const float *g, float *m, float *v,
                                int64_t n, lamb_numbers c, double *norms) {
    double pp = 0, uu = 0;
#pragma omp simd reduction(+ : pp, uu)
    for (int64_t i = 0; i < n; i++) {
        float w = p[i], d = g[i], x = c.beta1 * m[i] + c.first1 * d, y = c.beta2 * v[i] + c.first2 * (d * d);
        double u = lamb_u(c, w, x, y), ww = w;
        m[i] = x;
        v[i] = y;
        pp += ww * ww;
        uu += u * u;
    }
    norms[0] = pp;
    norms[1] = uu;
}

/* The same, but also keeps u. */
CLONES static void lamb_moments_kept(const float *p, const float *g, float *m, float *v, float *kept, int64_t n,
                                     lamb_numbers c, double *norms) {
    double pp = 0, uu = 0;
#pragma omp simd reduction(+ : pp, uu)
    for (int64_t i = 0; i < n; i++) {
        float w = p[i], d = g[i], x = c.beta1 * m[i] + c.first1 * d, y = c.beta2 * v[i] + c.first2 * (d * d);
        float u = lamb_u(c, w, x, y);
        double ww = w, wide = u;
        m[i] = x;
        v[i] = y;
        kept[i] = u;
        pp += ww * ww;
        uu += wide * wide;
    }
    norms[0] = pp;
    norms[1] = uu;
}

CLONES static void lamb_apply_kept(float *p, const float *kept, int64_t n, float rate) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] -= rate * kept[i];
}

CLONES static void lamb_apply(float *p, const float *m, const float *v, int64_t n,
                              lamb_numbers c, float rate) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) p[i] -= rate * lamb_u(c, p[i], m[i], v[i]);
}

CLONES static void lamb_at_once(float *p, const float *g, float *m, float *v, int64_t n,
                                lamb_numbers c, float rate) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float w = p[i], d = g[i], x = c.beta1 * m[i] + c.first1 * d, y = c.beta2 * v[i] + c.first2 * (d * d);
        m[i] = x;
        v[i] = y;
        p[i] = w - rate * lamb_u(c, w, x, y);
    }
}

/* ---- one block of one tensor ------------------------------------------------------------------------------------- */

/* Arrays are per tensor. a and b are the moments of LAMB; for LARS, a is the velocity and b is unused. */
typedef struct job {
    int64_t n;
    const int64_t *counts;
    float *const *p;
    const float *const *g;
    float *const *a;
    float *const *b;
    const double *decays, *unbias1, *unbias2;
    const uint8_t *twice; /* does the step of this tensor need norms? */
    double lr, coeff, epsilon, beta1, beta2, sign;
    int nesterov;
    float *scratch; /* NULL, or memory for `room` elements per thread */
    int64_t room;
    /* kept: NULL, or where the first pass stores u of these elements for the second */
    void (*first)(const struct job *, int64_t tensor, int64_t start, int64_t n, float *kept, double *norms);
    void (*second)(const struct job *, int64_t tensor, int64_t start, int64_t n, const float *kept, const double *norms);
} job;

static void lars_second(const job *j, int64_t t, int64_t start, int64_t n, const float *kept, const double *squared) {
    (void)kept;
    double decay = j->decays[t], local = j->lr;
    if (squared && squared[0] > 0 && squared[1] > 0) {
        double weight = sqrt(squared[0]);
        local = j->lr * j->coeff * weight / (sqrt(squared[1]) + decay * weight + j->epsilon);
    }
    lars_apply(j->p[t] + start, j->g[t] + start, j->a[t] + start, n, (float)(local * j->sign), (float)(local * decay),
               (float)j->beta1, j->nesterov);
}

static void lars_first(const job *j, int64_t t, int64_t start, int64_t n, float *kept, double *norms) {
    if (j->twice[t])
        lars_norms(j->p[t] + start, j->g[t] + start, n, norms);
    else
        lars_second(j, t, start, n, kept, NULL);
}

static lamb_numbers numbers(const job *j, int64_t t) {
    return (lamb_numbers){
        .beta1 = (float)j->beta1, .first1 = (float)(j->sign * (1 - j->beta1)), .unbias1 = (float)j->unbias1[t],
        .beta2 = (float)j->beta2, .first2 = (float)(1 - j->beta2), .unbias2 = (float)j->unbias2[t],
        .epsilon = (float)j->epsilon, .decay = (float)j->decays[t],
    };
}

static void lamb_first(const job *j, int64_t t, int64_t start, int64_t n, float *kept, double *norms) {
    float *p = j->p[t] + start, *m = j->a[t] + start, *v = j->b[t] + start;
    if (j->twice[t] && kept)
        lamb_moments_kept(p, j->g[t] + start, m, v, kept, n, numbers(j, t), norms);
    else if (j->twice[t])
        lamb_moments(p, j->g[t] + start, m, v, n, numbers(j, t), norms);
    else
        lamb_at_once(p, j->g[t] + start, m, v, n, numbers(j, t), (float)j->lr);
}

static void lamb_second(const job *j, int64_t t, int64_t start, int64_t n, const float *kept, const double *squared) {
    double ratio = squared[0] > 0 && squared[1] > 0 ? sqrt(squared[0]) / sqrt(squared[1]) : 1;
    if (kept)
        lamb_apply_kept(j->p[t] + start, kept, n, (float)(j->lr * ratio));
    else
        lamb_apply(j->p[t] + start, j->a[t] + start, j->b[t] + start, n, numbers(j, t), (float)(j->lr * ratio));
}

/* ---- all blocks of all tensors ----------------------------------------------------------------------------------- */

typedef struct {
    int64_t tensor, start, n;
    int64_t before; /* elements in all blocks before this one */
    double norms[2];
} block;

typedef struct {
    int64_t blocks, groups;
    block *block;
    int64_t *head;  /* the first block of each tensor, then the end */
    int64_t *group; /* the first block of each group, then the end */
} plan;

static int make_plan(const job *j, plan *out) {
    int64_t most = 0;
    for (int64_t t = 0; t < j->n; t++) most += (j->counts[t] + BLOCK - 1) / BLOCK;
    out->block = malloc((size_t)(most + 1) * sizeof(block));
    out->head = malloc((size_t)(j->n + 1) * sizeof(int64_t));
    out->group = malloc((size_t)(j->n + 1) * sizeof(int64_t));
    if (!out->block || !out->head || !out->group) return 1;
    int64_t b = 0, groups = 0, before = 0, filled = GROUP;
    for (int64_t t = 0; t < j->n; t++) {
        out->head[t] = b;
        if (j->counts[t] == 0) continue;
        if (filled + j->counts[t] > GROUP) {
            out->group[groups++] = b;
            filled = 0;
        }
        filled += j->counts[t];
        for (int64_t start = 0; start < j->counts[t]; start += BLOCK) {
            int64_t rest = j->counts[t] - start, n = rest < BLOCK ? rest : BLOCK;
            out->block[b++] = (block){.tensor = t, .start = start, .n = n, .before = before};
            before += n;
        }
    }
    out->head[j->n] = out->group[groups] = b;
    out->block[b] = (block){.before = before};
    out->blocks = b;
    out->groups = groups;
    return 0;
}

/* The first block from `low` on with at least `elements` before it. */
static int64_t split(const plan *s, int64_t low, int64_t high, int64_t elements) {
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (s->block[middle].before < elements)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void total(const plan *s, int64_t tensor, double *norms) {
    norms[0] = norms[1] = 0;
    for (int64_t b = s->head[tensor]; b < s->head[tensor + 1]; b++) {
        norms[0] += s->block[b].norms[0];
        norms[1] += s->block[b].norms[1];
    }
}

/* The last elements of a thread's part of a group are kept: as many as fit in the thread's scratch memory. */
typedef struct {
    float *scratch;
    int64_t from; /* the first element to keep, counted over all blocks */
} keeping;

static float *kept_of(keeping k, const block *b) {
    return k.scratch && b->before >= k.from ? k.scratch + (b->before - k.from) : NULL;
}

/* The work of one thread: an equal part of each group, the same in both passes, so that it is in the thread's cache. */
static void walk(const job *j, const plan *s, int passes, const double *norms, int thread, int threads) {
    for (int64_t k = 0; k < s->groups; k++) {
        int64_t low = s->group[k], high = s->group[k + 1];
        int64_t before = s->block[low].before, all = s->block[high].before - before;
        int64_t begin = split(s, low, high, before + all * thread / threads);
        int64_t end = split(s, low, high, before + all * (thread + 1) / threads);
        int keep = j->scratch && passes == (FIRST | SECOND);
        keeping kept = {keep ? j->scratch + thread * j->room : NULL, s->block[end].before - j->room};
        if (kept.from < s->block[begin].before) kept.from = s->block[begin].before;
        if (passes & FIRST)
            for (int64_t i = begin; i < end; i++) {
                block *b = &s->block[i];
                double sums[2] = {0, 0};
                j->first(j, b->tensor, b->start, b->n, kept_of(kept, b), sums);
                memcpy(b->norms, sums, sizeof sums);
            }
        if (passes == (FIRST | SECOND)) {
#ifdef _OPENMP
#pragma omp barrier
#endif
        }
        if (passes & SECOND) {
            /* Rejoin blocks of the same tensor, because prefetching restarts with every block. */
            int64_t summed = -1, from;
            double sums[2];
            for (int64_t i = end; i > begin; i = from) {
                const block *last = &s->block[i - 1];
                int64_t t = last->tensor;
                from = i - 1;
                int held = kept_of(kept, last) != NULL;
                while (from > begin && i - from < SPAN && s->block[from - 1].tensor == t &&
                       (kept_of(kept, &s->block[from - 1]) != NULL) == held)
                    from--;
                if (!j->twice[t]) continue;
                if (norms)
                    memcpy(sums, norms + 2 * t, sizeof sums);
                else if (summed != t)
                    total(s, t, sums);
                summed = t;
                int64_t start = s->block[from].start;
                j->second(j, t, start, last->start + last->n - start, kept_of(kept, &s->block[from]), sums);
            }
        }
    }
}

/* norms: NULL if both passes run; otherwise two squares per tensor, which the first pass writes and the second reads. */
static int run(const job *j, int passes, double *norms, int threads) {
    plan s = {0};
    int failed = make_plan(j, &s);
    if (!failed) {
#ifdef _OPENMP
#pragma omp parallel num_threads(threads)
#endif
        {
            /* A moment that only decays becomes a denormal, which is slow on many processors: flush it to zero.
               Denormals in the input are still read as they are. */
#ifdef __SSE2__
            unsigned mode = _mm_getcsr();
            _mm_setcsr(mode | _MM_FLUSH_ZERO_ON);
#endif
#ifdef _OPENMP
            walk(j, &s, passes, norms, omp_get_thread_num(), omp_get_num_threads());
#else
            (void)threads;
            walk(j, &s, passes, norms, 0, 1);
#endif
#ifdef __SSE2__
            _mm_setcsr(mode);
#endif
        }
        if (passes == FIRST)
            for (int64_t t = 0; t < j->n; t++) total(&s, t, norms + 2 * t);
    }
    free(s.block);
    free(s.head);
    free(s.group);
    return failed;
}

/* ---- called by native.py; return 0, or 1 if out of memory ------------------------------------------------------- */

int fleetx_lars(int64_t n, const int64_t *counts, float *const *p, const float *const *g, float *const *v,
                const double *decays, const uint8_t *twice, double lr, double coeff, double epsilon, double momentum,
                int nesterov, int maximize, int passes, double *norms, int threads) {
    job j = {
        .n = n, .counts = counts, .p = p, .g = g, .a = v, .decays = decays, .twice = twice, .lr = lr, .coeff = coeff,
        .epsilon = epsilon, .beta1 = momentum, .nesterov = nesterov, .sign = maximize ? -1 : 1, .first = lars_first,
        .second = lars_second,
    };
    return run(&j, passes, norms, threads);
}

int fleetx_lamb(int64_t n, const int64_t *counts, float *const *p, const float *const *g, float *const *m,
                float *const *v, const double *decays, const uint8_t *twice, const double *unbias1,
                const double *unbias2, float *scratch, int64_t room, double lr, double beta1, double beta2,
                double epsilon, int maximize, int passes, double *norms, int threads) {
    job j = {
        .scratch = room ? scratch : NULL, .room = room, .n = n, .counts = counts, .p = p, .g = g, .a = m, .b = v,
        .decays = decays, .twice = twice, .unbias1 = unbias1, .unbias2 = unbias2, .lr = lr,
        .epsilon = epsilon, .beta1 = beta1, .beta2 = beta2, .sign = maximize ? -1 : 1, .first = lamb_first,
        .second = lamb_second,
    };
    return run(&j, passes, norms, threads);
}

/* Checked by compiled.py, so that a library built before the arguments changed is not called. */
int fleetx_version(void) { return 2; }
