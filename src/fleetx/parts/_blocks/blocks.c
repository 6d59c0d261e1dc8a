/* Encodes blocks of fp32 values as rows of a few bits, and decodes them. native.py calls this through ctypes;
   __init__.py describes a row and does the same with torch, bit for bit. To match, this is compiled without FP
   contraction: a product is rounded before it is subtracted. */

#include <stdint.h>
#include <string.h>

/* Compile inner loops once per x86 instruction set, as in ../../optim/kernels.c. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#define INLINED __attribute__((always_inline)) static inline

enum { SCALE = 4, ENOUGH = 1 << 18 /* values that justify another thread */ };

static const float TINY = 1.17549435e-38f;   /* the smallest normal number */
static const float WHOLE = 12582912.f;       /* 1.5 * 2^23: adding it rounds a small number to an integer, ties to even */

static int threads_for(int64_t values, int threads) {
    int64_t useful = 1 + values / ENOUGH;
    return (int)(useful < threads ? useful : threads);
}

/* The largest magnitude, compared as integers, so that infinity and nan are the largest. */
INLINED float largest(const float *x, int64_t n) {
    uint32_t top = 0;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        top = bits > top ? bits : top;
    }
    float found;
    memcpy(&found, &top, 4);
    return found;
}

/* A code, still as a float. In a block with a non-finite scale every code is 0, and decodes to nan as 0 * scale. */
INLINED float code(float x, float scale, float most) {
    float y = x / scale;
    y = (y + WHOLE) - WHOLE;
    y = y > most ? most : y;
    y = y < -most ? -most : y;
    return y == y ? y : 0.f;
}

INLINED float code_at_random(float x, float noise, float scale, float most) {
    float y = x / scale + noise, whole = (y + WHOLE) - WHOLE;
    y = whole > y ? whole - 1.f : whole;
    y = y > most ? most : y;
    y = y < -most ? -most : y;
    return y == y ? y : 0.f;
}

/* `codes` holds n floats. keep: leave what is rounded off in x. */
CLONES static void encode_row(float *x, const float *noise, int64_t n, int bits, int keep, float *codes, uint8_t *row) {
    float most = bits == 16 ? 32767.f : bits == 8 ? 127.f : 7.f, scale = largest(x, n) / most;
    scale = scale < TINY ? TINY : scale; /* nan stays nan */
    memcpy(row, &scale, SCALE);
    row += SCALE;
    if (noise)
        for (int64_t i = 0; i < n; i++) codes[i] = code_at_random(x[i], noise[i], scale, most);
    else
        for (int64_t i = 0; i < n; i++) codes[i] = code(x[i], scale, most);
    if (keep)
        for (int64_t i = 0; i < n; i++) x[i] -= codes[i] * scale;
    if (bits == 16)
        for (int64_t i = 0; i < n; i++) {
            int16_t c = (int16_t)codes[i];
            memcpy(row + 2 * i, &c, 2);
        }
    else if (bits == 8)
        for (int64_t i = 0; i < n; i++) row[i] = (uint8_t)(int8_t)(int)codes[i];
    else
        for (int64_t i = 0; i < n / 2; i++) row[i] = (uint8_t)(((int)codes[2 * i] & 15) | ((int)codes[2 * i + 1] * 16));
}

CLONES static void decode_row(const uint8_t *row, int64_t n, int bits, int add, float *codes, float *out) {
    float scale;
    memcpy(&scale, row, SCALE);
    row += SCALE;
    if (bits == 16)
        for (int64_t i = 0; i < n; i++) {
            int16_t c;
            memcpy(&c, row + 2 * i, 2);
            codes[i] = c;
        }
    else if (bits == 8)
        for (int64_t i = 0; i < n; i++) codes[i] = (int8_t)row[i];
    else
        for (int64_t i = 0; i < n / 2; i++) {
            codes[2 * i] = (float)(((row[i] & 15) ^ 8) - 8);
            codes[2 * i + 1] = (float)(((row[i] >> 4) ^ 8) - 8);
        }
    if (add)
        for (int64_t i = 0; i < n; i++) out[i] += codes[i] * scale;
    else
        for (int64_t i = 0; i < n; i++) out[i] = codes[i] * scale;
}

/* `room` holds `block` floats per thread. noise: NULL to round to nearest. */
int fleetx_encode_blocks(float *x, const float *noise, int64_t rows, int64_t block, int bits, int keep, float *room,
                         uint8_t *out, int threads) {
    int64_t bytes = SCALE + block * bits / 8;
    threads = threads_for(rows * block, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++)
        for (int64_t r = rows * part / threads; r < rows * (part + 1) / threads; r++)
            encode_row(x + r * block, noise ? noise + r * block : 0, block, bits, keep, room + part * block,
                       out + r * bytes);
    return 0;
}

int fleetx_decode_blocks(const uint8_t *rows_of, int64_t rows, int64_t block, int bits, int add, float *room, float *out,
                         int threads) {
    int64_t bytes = SCALE + block * bits / 8;
    threads = threads_for(rows * block, threads);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int part = 0; part < threads; part++)
        for (int64_t r = rows * part / threads; r < rows * (part + 1) / threads; r++)
            decode_row(rows_of + r * bytes, block, bits, add, room + part * block, out + r * block);
    return 0;
}

int fleetx_version(void) { return 2; }
