/* Bit manipulation of numbers, shared by codec.c and decode.c. */

#ifndef FLEETX_WIRE_H
#define FLEETX_WIRE_H

#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "payloads are written in host byte order, which must be little-endian"
#endif

#define NOT_FINITE 0x7f800000u

/* The bits without the sign, which order like the magnitudes. Infinity and nan are NOT_FINITE or more. */
static inline uint32_t magnitude_at(const void *floats, int64_t i) {
    uint32_t bits;
    memcpy(&bits, (const char *)floats + 4 * i, sizeof bits);
    return bits & 0x7fffffffu;
}

static inline uint32_t magnitude(float x) { return magnitude_at(&x, 0); }

static inline float from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Uses integers, because not every compiler and processor supports 16-bit floats. Needs |x| < 2^15, which the scale of
   a payload ensures. */
static inline uint16_t to_half(float x) {
    uint32_t bits = magnitude(x), sign, small;
    memcpy(&sign, &x, sizeof sign);
    float shifted = from_bits(bits) + 0.5f; /* round to a multiple of 2^-24, the smallest half; ties to even */
    memcpy(&small, &shifted, sizeof small);
    uint32_t normal = ((bits + 0xfffu + ((bits >> 13) & 1)) >> 13) - (112u << 10);
    return (uint16_t)((bits < (113u << 23) ? small - (126u << 23) : normal) | ((sign >> 16) & 0x8000u));
}

/* Computes in double, where any half times any scale of a payload is exact. Creates no denormal floats, because torch
   may be set to flush them to zero. */
static inline double from_half(uint16_t h, double scale) {
    uint32_t bits = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float x = bits < (1u << 23) ? from_bits(bits + (113u << 23)) - 0x1p-14f : from_bits(bits + (112u << 23));
    return from_bits(magnitude(x) | sign) * scale; /* a branch would be mispredicted half the time */
}

#endif
