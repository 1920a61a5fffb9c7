// Matrix products of a few hundred rows with weights as a checkpoint has them, computed in float on a CPU.
//
// Weights (outputs, inputs) are read in their own type and widened a panel at a time; no packed copy is kept.
// From eight rows on, inputs are transposed, so that a vector holds one input of several rows: each weight is
// then broadcast, and sums need no reduction across lanes.
//
// Halves are packed bfloat16 weights, or float32 weights whose lower 16 bits are zero, as those of a bfloat16
// checkpoint: panels of WIDE vectors of outputs, in which a word holds the weights of two inputs. A shift or a mask
// widens them exactly, and decode steps read half the bytes. Tiles of AMX read the same order.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "host_tile.hpp"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES
#endif

namespace {

constexpr int LANES = lanes<float>, WIDE = 2, PANEL_OUTPUTS = LANES * WIDE;
constexpr int64_t AHEAD = 32;    // pairs of inputs whose weights are fetched ahead
constexpr int64_t DEPTH = 1024;  // inputs of a widened panel: it stays in the first caches
constexpr int64_t ROWS = 256;    // transposed at a time: they stay in the second cache
typedef uint16_t halves __attribute__((vector_size(LANES * 2)));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));

inline vec<float> load(const bf16* p) {
    halves h;
    std::memcpy(&h, p, sizeof h);
    words w = __builtin_convertvector(h, words) << 16;
    vec<float> v;
    std::memcpy(&v, &w, sizeof v);
    return v;
}

template <typename T>
void widen(const T* from, float* to, int64_t count) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const vec<float> v = load(from + i);
        std::memcpy(to + i, &v, sizeof v);
    }
    for (; i < count; i++) to[i] = wide(from[i]);
}

template <typename T>
void many(const float* inputs, const T* weights, const float* bias, float* outputs, int64_t rows, int64_t size,
          int64_t count, int64_t threads) {
    const int64_t width = (rows + LANES - 1) / LANES * LANES, panels = (count + PANEL - 1) / PANEL;
    static thread_local std::vector<float> shared;
    shared.assign(width * size, 0.0f);
    float* columns = shared.data();
    for (int64_t first = 0; first < size; first += 16)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t k = first; k < std::min(size, first + 16); k++) columns[k * width + row] = inputs[row * size + k];
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        static thread_local std::vector<float> room;
        room.resize(PANEL * (DEPTH + width));
        float *panel = room.data(), *sums = panel + PANEL * DEPTH;
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t begin = p * PANEL, wanted = std::min<int64_t>(PANEL, count - begin);
            std::fill(sums, sums + PANEL * width, 0.0f);
            for (int64_t first = 0; first < size; first += DEPTH) {
                const int64_t depth = std::min(DEPTH, size - first);
                for (int64_t o = 0; o < wanted; o++) widen(weights + (begin + o) * size + first, panel + o * DEPTH, depth);
                const float* part = columns + first * width;
                int64_t at = 0;
                for (; at + 2 * LANES <= width; at += 2 * LANES)
                    tile<float, 2, PANEL>(panel, DEPTH, 1, part + at, width, depth, sums + at);
                if (at < width) tile<float, 1, PANEL>(panel, DEPTH, 1, part + at, width, depth, sums + at);
            }
            for (int64_t row = 0; row < rows; row++)
                for (int64_t o = 0; o < wanted; o++)
                    outputs[row * count + begin + o] = sums[o * width + row] + (bias ? bias[begin + o] : 0.0f);
        }
    }
}

inline float total(vec<float> v) {
    float lanes[LANES];
    std::memcpy(lanes, &v, sizeof v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

template <typename T, int COUNT>
void few(const float* inputs, const T* weights, const float* bias, float* outputs, int64_t size, int64_t count,
         int64_t threads) {
    constexpr int AT_ONCE = COUNT < 4 ? 4 : 2;
    const int64_t whole = size / LANES * LANES;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t begin = 0; begin < count; begin += AT_ONCE) {
        const T* weight[AT_ONCE];
        for (int o = 0; o < AT_ONCE; o++) weight[o] = weights + std::min(begin + o, count - 1) * size;
        vec<float> sums[AT_ONCE][COUNT] = {};
        for (int64_t k = 0; k < whole; k += LANES) {
            vec<float> in[COUNT];
            for (int r = 0; r < COUNT; r++) in[r] = load(inputs + r * size + k);
            for (int o = 0; o < AT_ONCE; o++) {
                const vec<float> w = load(weight[o] + k);
                for (int r = 0; r < COUNT; r++) sums[o][r] += w * in[r];
            }
        }
        for (int64_t o = 0; o < std::min<int64_t>(AT_ONCE, count - begin); o++)
            for (int r = 0; r < COUNT; r++) {
                float sum = total(sums[o][r]) + (bias ? bias[begin + o] : 0.0f);
                for (int64_t k = whole; k < size; k++) sum += wide(weight[o][k]) * inputs[r * size + k];
                outputs[r * count + begin + o] = sum;
            }
    }
}

template <typename T>
void product(const float* inputs, const T* weights, const float* bias, float* outputs, const int64_t* n) {
    const int64_t rows = n[0], size = n[1], count = n[2], threads = n[3];
#define CASE(COUNT)                                                                \
    case COUNT:                                                                    \
        few<T, COUNT>(inputs, weights, bias, outputs, size, count, threads); \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
        default:
            for (int64_t first = 0; first < rows; first += ROWS)
                many<T>(inputs + first * size, weights, bias, outputs + first * count, std::min(ROWS, rows - first), size,
                        count, threads);
    }
#undef CASE
}

inline vec<float> as_floats(words w) {
    vec<float> v;
    std::memcpy(&v, &w, sizeof v);
    return v;
}

// COUNT rows of outputs times a panel. Inputs have the order (size, COUNT).
template <typename T, int COUNT>
void halves_tile(const float* inputs, const uint32_t* panel, int64_t pairs, const float* bias, T* output, int64_t step,
                 int64_t wanted) {
    vec<float> sums[COUNT][WIDE] = {};
    for (int64_t k = 0; k < pairs; k++) {
        vec<float> even[WIDE], odd[WIDE];
        for (int v = 0; v < WIDE; v++) {
            words w;
            const uint32_t* at = panel + (k * WIDE + v) * LANES;
            std::memcpy(&w, at, sizeof w);
            // The processor itself reads ahead too little: weights come from memory, or from a distant cache.
            __builtin_prefetch(at + AHEAD * PANEL_OUTPUTS);
            even[v] = as_floats(w << 16);
            odd[v] = as_floats(w & 0xffff0000u);
        }
        const float* own = inputs + 2 * k * COUNT;
        for (int r = 0; r < COUNT; r++) {
            const vec<float> in = own[r] - vec<float>{};
            for (int v = 0; v < WIDE; v++) sums[r][v] += in * even[v];
        }
        for (int r = 0; r < COUNT; r++) {
            const vec<float> in = own[COUNT + r] - vec<float>{};
            for (int v = 0; v < WIDE; v++) sums[r][v] += in * odd[v];
        }
    }
    for (int r = 0; r < COUNT; r++) {
        float row[PANEL_OUTPUTS];
        std::memcpy(row, sums[r], sizeof row);
        for (int64_t o = 0; o < wanted; o++) narrow(row[o] + (bias ? bias[o] : 0.0f), output + r * step + o);
    }
}

#ifdef TILES
constexpr int64_t SIDE = 16, DEEP = 32;  // rows of a tile, and bfloat16 numbers of a row
template <typename T>
constexpr int64_t TILE_ROWS = 256 / sizeof(T) * 2;  // turned into tiles at a time: they stay in the second cache

// Linux gives the tiles' registers to programs that ask.
const bool tiles_granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

// A float is the sum of three bfloat16 numbers: products of its parts with bfloat16 weights are exact.
template <typename T>
constexpr int PARTS = 3;
template <>
constexpr int PARTS<bf16> = 1;

inline void parts_of(const float* row, uint16_t* tile, int64_t step) {
    for (int64_t i = 0; i < DEEP; i += LANES) {
        vec<float> left = load(row + i);
        for (int part = 0; part < PARTS<float>; part++) {
            words bits;
            std::memcpy(&bits, &left, sizeof bits);
            const halves high = __builtin_convertvector(bits >> 16, halves);
            std::memcpy(tile + part * step + i, &high, sizeof high);
            left -= as_floats(bits & 0xffff0000u);
        }
    }
}
inline void parts_of(const bf16* row, uint16_t* tile, int64_t) { std::memcpy(tile, row, DEEP * sizeof *tile); }

inline void put(vec<float> v, float* out) { std::memcpy(out, &v, sizeof v); }
inline void put(vec<float> v, bf16* out) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(out, &rounded, sizeof rounded);
}

// Two blocks of rows, or one, times a panel: sums has the shape (2 * SIDE, PANEL_OUTPUTS).
template <typename T, bool TWO>
inline void tile_sums(const uint16_t* first, const uint16_t* second, const uint32_t* panel, int64_t steps, float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
        const uint32_t* at = panel + k * SIDE * PANEL_OUTPUTS;
        for (int64_t i = 0; i < SIDE * WIDE; i++) __builtin_prefetch(at + (AHEAD + i / WIDE) * PANEL_OUTPUTS + i % WIDE * LANES);
        _tile_loadd(4, at, PANEL_OUTPUTS * 4);
        _tile_loadd(5, at + LANES, PANEL_OUTPUTS * 4);
        for (int part = 0; part < PARTS<T>; part++) {
            const int64_t place = (k * PARTS<T> + part) * SIDE * DEEP;
            _tile_loadd(6, first + place, DEEP * 2);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 6, 5);
            if (!TWO) continue;
            _tile_loadd(7, second + place, DEEP * 2);
            _tile_dpbf16ps(2, 7, 4);
            _tile_dpbf16ps(3, 7, 5);
        }
    }
    _tile_stored(0, sums, PANEL_OUTPUTS * 4);
    _tile_stored(1, sums + LANES, PANEL_OUTPUTS * 4);
    if (!TWO) return;
    _tile_stored(2, sums + SIDE * PANEL_OUTPUTS, PANEL_OUTPUTS * 4);
    _tile_stored(3, sums + SIDE * PANEL_OUTPUTS + LANES, PANEL_OUTPUTS * 4);
}

// As halves_product, by tiles; size is a multiple of DEEP.
template <typename T>
void tiles_product(const T* inputs, const uint32_t* weight, const float* bias, T* outputs, const int64_t* n) {
    const int64_t rows = n[0], size = n[1], count = n[2], threads = n[3], steps = size / DEEP;
    const int64_t block_size = steps * PARTS<T> * SIDE * DEEP;
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
    } shape;
    for (int t = 0; t < 8; t++) shape.rows[t] = t == 4 || t == 5 ? SIDE : std::min(SIDE, rows);
    static thread_local std::vector<uint16_t> room;
    room.resize((TILE_ROWS<T> / SIDE) * block_size + SIDE * DEEP);
    uint16_t* turned = room.data();
    for (int64_t from = 0; from < rows; from += TILE_ROWS<T>) {
        const int64_t some = std::min(TILE_ROWS<T>, rows - from);
        for (int64_t r = 0; r < some; r++)
            for (int64_t k = 0; k < steps; k++)
                parts_of(inputs + (from + r) * size + k * DEEP,
                         turned + r / SIDE * block_size + k * PARTS<T> * SIDE * DEEP + r % SIDE * DEEP, SIDE * DEEP);
#pragma omp parallel num_threads(threads) if (threads > 1)
        {
            alignas(64) float sums[2 * SIDE * PANEL_OUTPUTS];
            // GCC 12 does not know that tiles read memory.
            __asm__ volatile("" ::: "memory");
            _tile_loadconfig(&shape);
#pragma omp for schedule(static)
            for (int64_t o = 0; o < count; o += PANEL_OUTPUTS)
                for (int64_t r = 0; r < some; r += 2 * SIDE) {
                    const uint16_t* first = turned + r / SIDE * block_size;
                    const uint32_t* panel = weight + o * steps * SIDE;
                    if (some - r > SIDE)
                        tile_sums<T, true>(first, first + block_size, panel, steps, sums);
                    else
                        tile_sums<T, false>(first, first, panel, steps, sums);
                    const int64_t wanted = std::min<int64_t>(PANEL_OUTPUTS, count - o);
                    for (int64_t i = 0; i < std::min(2 * SIDE, some - r); i++) {
                        T* output = outputs + (from + r + i) * count + o;
                        const float* own = sums + i * PANEL_OUTPUTS;
                        if (wanted == PANEL_OUTPUTS)
                            for (int64_t j = 0; j < wanted; j += LANES)
                                put(load(own + j) + (bias ? load(bias + o + j) : vec<float>{}), output + j);
                        else
                            for (int64_t j = 0; j < wanted; j++) narrow(own[j] + (bias ? bias[o + j] : 0.0f), output + j);
                    }
                }
            _tile_release();
        }
    }
}
#endif

template <typename T>
void halves_product(const T* inputs, const uint32_t* weight, const float* bias, T* outputs, const int64_t* n) {
    const int64_t rows = n[0], size = n[1], count = n[2], threads = n[3], pairs = (size + 1) / 2;
#ifdef TILES
    if (tiles_granted && size % DEEP == 0) return tiles_product(inputs, weight, bias, outputs, n);
#endif
    typedef void (*Tile)(const float*, const uint32_t*, int64_t, const float*, T*, int64_t, int64_t);
    static const Tile tiles[] = {
        halves_tile<T, 1>, halves_tile<T, 2>, halves_tile<T, 3>, halves_tile<T, 4>, halves_tile<T, 5>, halves_tile<T, 6>,
#if defined(__AVX512F__)
        halves_tile<T, 7>, halves_tile<T, 8>, halves_tile<T, 9>, halves_tile<T, 10>, halves_tile<T, 11>, halves_tile<T, 12>,
#endif
    };
    constexpr int64_t MOST = sizeof tiles / sizeof *tiles;
    static thread_local std::vector<float> room;
    room.resize(ROWS * 2 * pairs);
    float* turned = room.data();
    for (int64_t from = 0; from < rows; from += ROWS) {
        const int64_t block = std::min(ROWS, rows - from), parts = (block + MOST - 1) / MOST;
        for (int64_t part = 0; part < parts; part++) {
            const int64_t begin = part * block / parts, some = (part + 1) * block / parts - begin;
            float* to = turned + begin * 2 * pairs;
            for (int64_t r = 0; r < some; r++) {
                const T* row = inputs + (from + begin + r) * size;
                for (int64_t k = 0; k < size; k++) to[k * some + r] = wide(row[k]);
                if (size % 2) to[size * some + r] = 0.0f;
            }
        }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t o = 0; o < count; o += PANEL_OUTPUTS)
            for (int64_t part = 0; part < parts; part++) {
                const int64_t begin = part * block / parts, some = (part + 1) * block / parts - begin;
                tiles[some - 1](turned + begin * 2 * pairs, weight + o * pairs, pairs, bias ? bias + o : nullptr,
                                outputs + (from + begin) * count + o, count, std::min<int64_t>(PANEL_OUTPUTS, count - o));
            }
    }
}

inline uint32_t bits_of(bf16 x) { return uint32_t(x.bits) << 16; }
inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

// Returns the bits that were lost: zero if the halves are the weights.
template <typename T>
int64_t pack_halves(const T* weight, uint32_t* packed, int64_t size, int64_t count) {
    const int64_t pairs = (size + 1) / 2;
    uint32_t lost = 0;
    for (int64_t first = 0; first < count; first += PANEL_OUTPUTS)
        for (int64_t k = 0; k < pairs; k++, packed += PANEL_OUTPUTS)
            for (int64_t o = 0; o < PANEL_OUTPUTS; o++) {
                const T* row = weight + (first + o) * size + 2 * k;
                const uint32_t even = first + o < count ? bits_of(row[0]) : 0;
                const uint32_t odd = first + o < count && 2 * k + 1 < size ? bits_of(row[1]) : 0;
                lost |= (even | odd) & 0xffffu;
                packed[o] = even >> 16 | (odd & 0xffff0000u);
            }
    return lost;
}

}  // namespace

extern "C" int64_t panel_outputs() { return PANEL_OUTPUTS; }

#define EXPORT(NAME, T)                                                                                        \
    extern "C" void product_##NAME(const float* inputs, const T* weights, const float* bias, float* outputs,   \
                                   const int64_t* n) {                                                         \
        product<T>(inputs, weights, bias, outputs, n);                                                         \
    }                                                                                                          \
    extern "C" void halves_##NAME(const T* inputs, const uint32_t* weights, const float* bias, T* outputs,     \
                                  const int64_t* n) {                                                          \
        halves_product<T>(inputs, weights, bias, outputs, n);                                                  \
    }                                                                                                          \
    extern "C" int64_t pack_##NAME(const T* weights, uint32_t* packed, int64_t size, int64_t count) {          \
        return pack_halves<T>(weights, packed, size, count);                                                   \
    }
EXPORT(float32, float)
EXPORT(bfloat16, bf16)
