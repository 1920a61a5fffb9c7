// Number formats, and the tile of a matrix product that stays in registers.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int VECTOR = 64, PANEL = 12, STRIP = 8;
#else
constexpr int VECTOR = 32, PANEL = 6, STRIP = 4;
#endif

template <typename C>
struct vector_of {
    typedef C type __attribute__((vector_size(VECTOR)));
};
template <typename C>
using vec = typename vector_of<C>::type;
template <typename C>
constexpr int lanes = VECTOR / int(sizeof(C));

struct bf16 {
    uint16_t bits;
};
inline float wide(float x) { return x; }
inline double wide(double x) { return x; }
inline float wide(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

inline void narrow(float x, float* out) { *out = x; }
inline void narrow(double x, double* out) { *out = x; }
inline void narrow(float x, bf16* out) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    // To the nearest, ties to even; NaN stays NaN.
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    out->bits = uint16_t(x != x ? 0x7fc0 : rounded);
}

template <typename C>
inline vec<C> load(const C* p) {
    vec<C> v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// sums (OUTPUTS, width) += panel (OUTPUTS, depth) x columns (depth, width), for VECTORS vectors of columns. In the
// panel an output is `output` further, and a depth `step`.
template <typename C, int VECTORS, int OUTPUTS>
void tile(const C* panel, int64_t output, int64_t step, const C* columns, int64_t width, int64_t depth, C* sums) {
    constexpr int L = lanes<C>;
    vec<C> total[OUTPUTS][VECTORS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int v = 0; v < VECTORS; v++) total[o][v] = load(sums + o * width + v * L);
    for (int64_t k = 0; k < depth; k++) {
        vec<C> in[VECTORS];
        for (int v = 0; v < VECTORS; v++) in[v] = load(columns + k * width + v * L);
        for (int o = 0; o < OUTPUTS; o++) {
            const vec<C> weight = panel[o * output + k * step] - vec<C>{};
            for (int v = 0; v < VECTORS; v++) total[o][v] += weight * in[v];
        }
    }
    for (int o = 0; o < OUTPUTS; o++)
        for (int v = 0; v < VECTORS; v++) std::memcpy(sums + o * width + v * L, &total[o][v], sizeof(vec<C>));
}

}  // namespace
