// What a decode step computes between its matrix products, on a CPU: attention of one token a row over rows of
// any lengths, the writing of its keys and values, norms and rotary embeddings, each in one call.
//
// Numbers are kept in T, and computed in C: float for bfloat16 and float, double for double. Attention may ask in
// another type, Q, than keys and values have.
// NaN goes through: nothing here relies on finite numbers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "host_tile.hpp"

namespace {

// exp for x <= 0, to 2e-7 relative: a polynomial that the compiler vectorizes.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyint(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t power = (int32_t(n) + 127) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return p * scale;
}
inline double exponential(double x) { return std::exp(x); }

constexpr int CHUNK = 64;

struct Layout {
    // Where column c of a row lies: with a table of blocks at (table[c / block] * block + c % block) * column,
    // without at row * row_step + c * column; a head further is head_step.
    const int64_t* table;
    int64_t table_step, block, row_step, head_step, column_step;
    int64_t at(int64_t row, int64_t column) const {
        if (!table) return row * row_step + column * column_step;
        return (table[row * table_step + column / block] * block + column % block) * column_step;
    }
    // Where count columns from first on lie: one division a block instead of one a column.
    void places(int64_t row, int64_t first, int64_t count, int64_t* found) const {
        if (table && block == 1) {
            const int64_t* own = table + row * table_step + first;
            for (int64_t c = 0; c < count; c++) found[c] = own[c] * column_step;
            return;
        }
        for (int64_t c = 0; c < count;) {
            const int64_t begin = at(row, first + c);
            const int64_t end = table ? std::min(count, c + block - (first + c) % block) : count;
            for (int64_t i = c; i < end; i++) found[i] = begin + (i - c) * column_step;
            c = end;
        }
    }
};

// What rows have attended to before their own columns: sums of values, their weight, and the largest score.
template <typename C>
struct Before {
    int64_t heads;
    std::vector<C> sums, top, weight;
    std::vector<int64_t> begin;
};

// Vectors of queries that attend together to columns that their rows share.
constexpr int64_t MOST_VECTORS = 3;
template <typename C>
constexpr int64_t FEWEST = lanes<C> / 2;  // for fewer a row at a time is as fast

// Queries [from, from + count) of some rows attend to columns together: a vector holds one number of several.
template <typename Q, typename T, typename C, int VECTORS>
void attend_shared(const Q* query, const T* keys, const T* values, const Layout& kl, const Layout& vl,
                   const int64_t* members, int64_t from, int64_t count, int64_t head, int64_t group, int64_t ks,
                   int64_t vs, int64_t begin, int64_t end, C scale, Before<C>& before, std::vector<C>& room) {
    constexpr int64_t W = VECTORS * lanes<C>;
    const int64_t padded = (vs + STRIP - 1) / STRIP * STRIP;
    room.assign(ks * W + padded * W + CHUNK * W + CHUNK * std::max(ks, padded), C(0));
    C *asked = room.data(), *sums = asked + ks * W, *scores = sums + padded * W, *panel = scores + CHUNK * W;
    C top[W], weight[W], fade[W];
    int64_t places[CHUNK];
    auto place = [&](int64_t q) {
        return members[(from + q) / group] * before.heads + head * group + (from + q) % group;
    };
    for (int64_t q = 0; q < W; q++) {
        top[q] = q < count ? before.top[place(q)] : C(-INFINITY);
        weight[q] = q < count ? before.weight[place(q)] : C(0);
        if (q >= count) continue;
        for (int64_t i = 0; i < ks; i++) asked[i * W + q] = wide(query[place(q) * ks + i]) * scale;
        for (int64_t i = 0; i < vs; i++) sums[i * W + q] = before.sums[place(q) * vs + i];
    }
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t columns = std::min<int64_t>(CHUNK, end - first);
        kl.places(members[0], first, columns, places);
        for (int64_t c = 0; c < columns; c++)
            for (int64_t i = 0; i < ks; i++) panel[c * ks + i] = wide(keys[head * kl.head_step + places[c] + i]);
        std::fill(scores, scores + CHUNK * W, C(0));
        for (int64_t c = 0; c < columns; c += STRIP)
            tile<C, VECTORS, STRIP>(panel + c * ks, ks, 1, asked, W, ks, scores + c * W);
        for (int64_t q = 0; q < W; q++) fade[q] = top[q];
        for (int64_t c = 0; c < columns; c++)
            for (int64_t q = 0; q < W; q++) top[q] = scores[c * W + q] > top[q] ? scores[c * W + q] : top[q];
        for (int64_t q = 0; q < W; q++) {
            fade[q] = exponential(fade[q] - top[q]);
            weight[q] *= fade[q];
        }
        for (int64_t c = 0; c < columns; c++)
            for (int64_t q = 0; q < W; q++) {
                scores[c * W + q] = exponential(scores[c * W + q] - top[q]);
                weight[q] += scores[c * W + q];
            }
        for (int64_t i = 0; i < padded; i++)
            for (int64_t q = 0; q < W; q++) sums[i * W + q] *= fade[q];
        vl.places(members[0], first, columns, places);
        for (int64_t c = 0; c < columns; c++)
            for (int64_t i = 0; i < vs; i++)
                panel[c * padded + i] = wide(values[head * vl.head_step + places[c] + i]);
        for (int64_t i = 0; i < padded; i += STRIP)
            tile<C, VECTORS, STRIP>(panel + i, 1, padded, scores, W, columns, sums + i * W);
    }
    for (int64_t q = 0; q < count; q++) {
        before.top[place(q)] = top[q];
        before.weight[place(q)] = weight[q];
        for (int64_t i = 0; i < vs; i++) before.sums[place(q) * vs + i] = sums[i * W + q];
    }
}

// One row's key-value heads [head, head + heads), a chunk of columns at a time for all of them: what lies next to one
// another is read at once.
template <typename Q, typename T, typename C, int SIZE>
void attend_heads(const Q* query, const T* keys, const T* values, Q* output, const Layout& kl, const Layout& vl,
                  int64_t row, int64_t head, int64_t heads, int64_t group, int64_t key_size, int64_t value_size,
                  int64_t begin, int64_t end, C scale, const Before<C>& before, std::vector<C>& room) {
    const int64_t ks = SIZE ? SIZE : key_size, vs = SIZE ? SIZE : value_size, all = heads * group;
    room.assign(all * (ks + vs + 2) + group * CHUNK, C(0));
    C *asked = room.data(), *sums = asked + all * ks, *top = sums + all * vs, *weight = top + all;
    C* scores = weight + all;
    for (int64_t i = 0; i < all * ks; i++) asked[i] = wide(query[i]) * scale;
    std::fill(top, top + all, C(-INFINITY));
    if (!before.top.empty()) {
        const int64_t from = row * before.heads + head * group;
        std::copy_n(before.sums.data() + from * vs, all * vs, sums);
        std::copy_n(before.top.data() + from, all, top);
        std::copy_n(before.weight.data() + from, all, weight);
    }
    int64_t key_at[CHUNK], value_at[CHUNK];
    for (int64_t first = begin; first < end; first += CHUNK) {
        const int64_t count = std::min<int64_t>(CHUNK, end - first);
        kl.places(row, first, count, key_at);
        vl.places(row, first, count, value_at);
        for (int64_t h = 0; h < heads; h++) {
            const T *key_head = keys + (head + h) * kl.head_step, *value_head = values + (head + h) * vl.head_step;
            const C* own = asked + h * group * ks;
            C *own_sums = sums + h * group * vs, *own_top = top + h * group, *own_weight = weight + h * group;
            for (int64_t c = 0; c < count; c++) {
                const T* key = key_head + key_at[c];
                for (int64_t g = 0; g < group; g++) {
                    const C* mine = own + g * ks;
                    C sum = 0;
                    for (int64_t i = 0; i < ks; i++) sum += mine[i] * wide(key[i]);
                    scores[g * CHUNK + c] = sum;
                }
            }
            for (int64_t g = 0; g < group; g++) {
                C* score = scores + g * CHUNK;
                C higher = own_top[g];
                for (int64_t c = 0; c < count; c++) higher = score[c] > higher ? score[c] : higher;
                const C fade = own_top[g] == higher ? C(1) : exponential(own_top[g] - higher);
                C total = 0;
                for (int64_t c = 0; c < count; c++) {
                    score[c] = exponential(score[c] - higher);
                    total += score[c];
                }
                own_weight[g] = own_weight[g] * fade + total;
                own_top[g] = higher;
                if (fade != C(1))
                    for (int64_t i = 0; i < vs; i++) own_sums[g * vs + i] *= fade;
            }
            for (int64_t c = 0; c < count; c++) {
                const T* value = value_head + value_at[c];
                for (int64_t g = 0; g < group; g++) {
                    const C share = scores[g * CHUNK + c];
                    C* mine = own_sums + g * vs;
                    for (int64_t i = 0; i < vs; i++) mine[i] += share * wide(value[i]);
                }
            }
        }
    }
    for (int64_t g = 0; g < all; g++)
        for (int64_t i = 0; i < vs; i++) narrow(sums[g * vs + i] / weight[g], output + g * vs + i);
}

template <typename Q, typename T, typename C>
void attend(const Q* query, const T* keys, const T* values, Q* output, const int64_t* positions,
            const int64_t* table, const int64_t* shared, const int64_t* n, double scale) {
    // shared: for each of n[15] groups of rows its first column, the column after its last one, its rows' number and
    // its rows. A row's groups come in the order of their columns, begin at 0, and have fewer and fewer rows.
    const int64_t rows = n[0], heads = n[1], kv_heads = n[2], key_size = n[3], value_size = n[4], window = n[5];
    const Layout kl{table, n[6], n[7], n[8], n[9], n[10]}, vl{table, n[6], n[7], n[11], n[12], n[13]};
    const int64_t group = heads / kv_heads, threads = n[14];
    // Fewer rows than threads: each head is a thread's own.
    const int64_t at_once = rows < threads ? 1 : kv_heads, groups = window > 0 ? 0 : n[15];
    Before<C> before{heads, {}, {}, {}, std::vector<int64_t>(rows, 0)};
    if (groups) {
        before.sums.assign(rows * heads * value_size, C(0));
        before.top.assign(rows * heads, C(-INFINITY));
        before.weight.assign(rows * heads, C(0));
    }
    const int64_t* at = shared;
    for (int64_t g = 0; g < groups; g++) {
        for (int64_t m = 0; m < at[2]; m++)
            if (at[2] * group >= FEWEST<C>) before.begin[at[3 + m]] = at[1];
        at += 3 + at[2];
    }
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<C> room;
        const int64_t* next = shared;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t first = next[0], last = next[1], members = next[2], *member = next + 3;
            next = member + members;
            const int64_t queries = members * group, vectors = (queries + lanes<C> - 1) / lanes<C>;
            const int64_t parts = (vectors + MOST_VECTORS - 1) / MOST_VECTORS;
            if (queries < FEWEST<C>) continue;
#pragma omp for collapse(2) schedule(dynamic)
            for (int64_t part = 0; part < parts; part++)
                for (int64_t head = 0; head < kv_heads; head++) {
                    const int64_t wide = (part + 1) * vectors / parts - part * vectors / parts;
                    const int64_t from = part * vectors / parts * lanes<C>;
                    const int64_t count = std::min(wide * lanes<C>, queries - from);
                    const auto attend_all = wide == 1 ? attend_shared<Q, T, C, 1> : wide == 2 ? attend_shared<Q, T, C, 2>
                                                                                              : attend_shared<Q, T, C, 3>;
                    attend_all(query, keys, values, kl, vl, member, from, count, head, group, key_size, value_size,
                               first, last, C(scale), before, room);
                }
        }
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < kv_heads; head += at_once) {
                const int64_t end = positions[row] + 1;
                const int64_t begin = window > 0 ? std::max<int64_t>(0, end - window) : before.begin[row];
                const Q* asked = query + (row * heads + head * group) * key_size;
                Q* result = output + (row * heads + head * group) * value_size;
                const int size = key_size == value_size ? int(key_size) : 0;
#define CASE(S)                                                                                            \
    case S:                                                                                                \
        attend_heads<Q, T, C, S>(asked, keys, values, result, kl, vl, row, head, at_once, group, key_size, \
                                 value_size, begin, end, C(scale), before, room);                          \
        break;
                switch (size) {
                    CASE(16) CASE(32) CASE(64) CASE(128)
                    default:
                        attend_heads<Q, T, C, 0>(asked, keys, values, result, kl, vl, row, head, at_once, group,
                                                 key_size, value_size, begin, end, C(scale), before, room);
                }
#undef CASE
            }
    }
}

inline void put(const float* from, bf16* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) narrow(from[i], to + i);
}
template <typename T>
void put(const T* from, T* to, int64_t count) {
    std::memcpy(to, from, count * sizeof(T));
}

template <typename Q, typename T>
void keep(const Q* states, T* buffer, const int64_t* positions, const int64_t* table, const int64_t* n) {
    // n: rows, heads, size, step of a row and of a head in states, then the layout as in attend.
    const Layout place{table, n[5], n[6], n[7], n[8], n[9]};
    for (int64_t row = 0; row < n[0]; row++)
        for (int64_t head = 0; head < n[1]; head++)
            put(states + row * n[3] + head * n[4], buffer + place.at(row, positions[row]) + head * place.head_step,
                n[2]);
}

template <typename T, typename C>
void norm(const T* input, const T* weight, T* output, int64_t rows, int64_t size, double epsilon, int64_t kind) {
    // Kind 0 rounds before the weight is applied (Llama), 1 applies one plus the weight before (Gemma).
    for (int64_t row = 0; row < rows; row++) {
        const T* in = input + row * size;
        T* out = output + row * size;
        C sum = 0;
        for (int64_t i = 0; i < size; i++) sum += wide(in[i]) * wide(in[i]);
        const C factor = C(1) / std::sqrt(sum / C(size) + C(epsilon));
        if (kind == 0)
            for (int64_t i = 0; i < size; i++) {
                T rounded;
                narrow(wide(in[i]) * factor, &rounded);
                narrow(wide(rounded) * wide(weight[i]), out + i);
            }
        else
            for (int64_t i = 0; i < size; i++)
                narrow(wide(in[i]) * factor * (C(1) + wide(weight[i])), out + i);
    }
}

template <typename T, typename C>
void rotate(const T* states, T* output, const T* cosines, const T* sines, const int64_t* n) {
    // states (rows, heads, 1, size) with the steps n[3], n[4] of a row and a head; output contiguous;
    // cosines and sines (rows, 1, size), a row n[5] further. Each product is rounded as torch's own are.
    const int64_t rows = n[0], heads = n[1], size = n[2], half = size / 2;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t head = 0; head < heads; head++) {
            const T* in = states + row * n[3] + head * n[4];
            const T *cosine = cosines + row * n[5], *sine = sines + row * n[5];
            T* out = output + (row * heads + head) * size;
            for (int64_t i = 0; i < half; i++) {
                T a, b, c, d;
                narrow(wide(in[i]) * wide(cosine[i]), &a);
                narrow(-wide(in[i + half]) * wide(sine[i]), &b);
                narrow(wide(in[i + half]) * wide(cosine[i + half]), &c);
                narrow(wide(in[i]) * wide(sine[i + half]), &d);
                narrow(wide(a) + wide(b), out + i);
                narrow(wide(c) + wide(d), out + i + half);
            }
        }
}

}  // namespace

#define EXPORT_KV(NAME, Q, T, C)                                                                             \
    extern "C" void attend_##NAME(const Q* q, const T* k, const T* v, Q* out, const int64_t* positions,      \
                                  const int64_t* table, const int64_t* shared, const int64_t* n,             \
                                  double scale) {                                                            \
        attend<Q, T, C>(q, k, v, out, positions, table, shared, n, scale);                                   \
    }                                                                                                        \
    extern "C" void keep_##NAME(const Q* states, T* buffer, const int64_t* positions, const int64_t* table,  \
                                const int64_t* n) {                                                          \
        keep<Q, T>(states, buffer, positions, table, n);                                                     \
    }

#define EXPORT(NAME, T, C)                                                                                   \
    EXPORT_KV(NAME, T, T, C)                                                                                 \
    extern "C" void norm_##NAME(const T* in, const T* weight, T* out, int64_t rows, int64_t size,            \
                                double epsilon, int64_t kind) {                                              \
        norm<T, C>(in, weight, out, rows, size, epsilon, kind);                                              \
    }                                                                                                        \
    extern "C" void rotate_##NAME(const T* states, T* out, const T* cosines, const T* sines,                 \
                                  const int64_t* n) {                                                        \
        rotate<T, C>(states, out, cosines, sines, n);                                                        \
    }

EXPORT(float32, float, float)
EXPORT(float64, double, double)
EXPORT(bfloat16, bf16, float)
EXPORT_KV(float32_bfloat16, float, bf16, float)
