// Attention mass of chunks: from the index, which holds the keys of some KV heads at 4 bits, or from page images.
#include "kvf_engine.h"
#include "kvf_products.h"

#include <cmath>
#include <cstring>
#include <numeric>

namespace {

constexpr ggml_type INDEX_TYPE = GGML_TYPE_Q4_0;
constexpr int64_t   AT_ONCE    = 1 << 15;  // scores of one graph: they stay in the cache, and several chunks share its cost

// Where the keys of one KV head lie in the record of a chunk, which is an index row or a page image. Sizes are in bytes.
struct key_rows {
    kvf_head  unit;
    float     scale;
    int64_t   head_k;
    int64_t   width;   // values of a row: head_k, or whole blocks
    ggml_type type;
    size_t    offset;
    size_t    stride;
};

// The queries of all query heads that read one KV head: columns [first, first + count) of the result.
struct column_group {
    const key_rows *     keys;
    int64_t              first;
    int64_t              count;
    std::vector<uint8_t> queries;
};

bool precedes(const kvf_head & a, const kvf_head & b) {
    return a.layer < b.layer || (a.layer == b.layer && a.head < b.head);
}

// At least one, in order, none twice, each a head of its layer; n_head says which kind.
bool heads_ok(const std::vector<kvf_layer> & layers, int32_t n, const kvf_head * heads, int32_t kvf_layer::*n_head) {
    for (int32_t i = 0; i < n; ++i) {
        const auto & x = heads[i];
        if (x.layer < 0 || x.layer >= (int64_t) layers.size() || x.head < 0 || x.head >= layers[x.layer].*n_head
                || (i > 0 && !precedes(heads[i - 1], x))) {
            return false;
        }
    }
    return n > 0;
}

kvf_head unit_of(const kvf_layer & l, const kvf_head & head) {
    return { head.layer, head.head/(l.n_head/l.n_head_kv) };
}

// Empty if the units are wrong.
std::vector<key_rows> rows_of_index(const std::vector<kvf_layer> & layers, int32_t n_units, const kvf_head * units) {
    std::vector<key_rows> res;
    if (!heads_ok(layers, n_units, units, &kvf_layer::n_head_kv)) {
        return res;
    }
    size_t offset = 0;
    for (int32_t i = 0; i < n_units; ++i) {
        const auto & l      = layers[units[i].layer];
        const auto   width  = GGML_PAD(l.head_k, ggml_blck_size(INDEX_TYPE));
        const auto   stride = ggml_row_size(INDEX_TYPE, width);
        res.push_back({ units[i], l.scale, l.head_k, width, INDEX_TYPE, offset, stride });
        offset += KVF_BLOCK*stride;
    }
    return res;
}

key_rows rows_of_image(const kvf_layer & l, ggml_type type, const kvf_head & unit) {
    const auto offset = l.k_offset + unit.head*ggml_row_size(type, l.head_k);
    return { unit, l.scale, l.head_k, l.head_k, type, offset, (size_t) l.k_row };
}

// exp(x) for -87 <= x <= 0, to 1e-6 of it. In a loop the compiler makes vectors of this, which it does not of std::exp.
inline float exp_negative(float x) {
    constexpr float ROUND = 12582912.0f;  // 1.5*2^23: what is added to it is rounded to an integer, which its lowest bits hold
    const float n = x*1.442695041f + ROUND;
    const float y = x - (n - ROUND)*0.6931471806f;
    const float p = 1 + y*(1 + y*(1/2.0f + y*(1/6.0f + y*(1/24.0f + y*(1/120.0f + y*(1/720.0f))))));
    uint32_t    bits;
    std::memcpy(&bits, &n, sizeof(bits));
    bits = (bits << 23) + (127u << 23);  // of 2^n
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return p*power;
}

// log(sum(exp(scale*x))) over the keys of a chunk. Loops of one operation each: gcc makes no vectors of them together.
float log_mass(const float * x, float scale) {
    constexpr int LANES = 8;  // of their own, or each step would wait for the one before
    static_assert(KVF_BLOCK % LANES == 0);
    float most[LANES], sum[LANES] = {}, share[KVF_BLOCK];
    std::copy(x, x + LANES, most);
    for (int i = LANES; i < KVF_BLOCK; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            most[j] = std::max(most[j], x[i + j]);
        }
    }
    const float top = *std::max_element(most, most + LANES);
    for (int i = 0; i < KVF_BLOCK; ++i) {
        share[i] = std::max(scale*(x[i] - top), -87.0f);
    }
    for (int i = 0; i < KVF_BLOCK; ++i) {
        share[i] = exp_negative(share[i]);
    }
    for (int i = 0; i < KVF_BLOCK; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            sum[j] += share[i + j];
        }
    }
    return scale*top + std::log(std::accumulate(sum, sum + LANES, 0.0f));
}

// Empty if the keys of a head are not among `keys`.
std::vector<column_group> group_columns(const std::vector<kvf_layer> & layers, const std::vector<key_rows> & keys,
                                        int32_t n_heads, const kvf_head * heads, int32_t rows, const float * queries) {
    std::vector<column_group> res;
    std::vector<float>        padded;
    auto                      next = keys.begin();
    for (int32_t i = 0; i < n_heads; ++i) {
        const auto unit = unit_of(layers[heads[i].layer], heads[i]);
        while (next != keys.end() && precedes(next->unit, unit)) {
            ++next;
        }
        if (next == keys.end() || precedes(unit, next->unit)) {
            return {};
        }
        if (res.empty() || res.back().keys != &*next) {
            res.push_back({ &*next, (int64_t) i*rows, 0, {} });
        }
        auto &            group = res.back();
        const kvf_encoder encode(next->type);
        const auto        size = ggml_row_size(encode.type, next->width);
        group.queries.resize((group.count + rows)*size);
        padded.assign(next->width, 0.0f);
        for (int32_t r = 0; r < rows; ++r) {
            std::copy(queries, queries + next->head_k, padded.begin());
            encode(padded.data(), next->width, group.queries.data() + group.count++*size);
            queries += next->head_k;
        }
    }
    return res;
}

int score(const std::vector<kvf_layer> & layers, const std::vector<key_rows> & keys, int32_t n_heads,
          const kvf_head * heads, int32_t n, const uint64_t * record, int32_t rows, const float * queries, float * out,
          int32_t n_threads) {
    const auto groups = group_columns(layers, keys, n_heads, heads, rows, queries);
    if (groups.empty()) {
        return KVF_E_ARGUMENT;
    }
    const int64_t per_chunk = (int64_t) n_heads*rows*KVF_BLOCK;
    kvf_in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        const auto count = std::clamp<int64_t>(AT_ONCE/per_chunk, 1, last - first);
        kvf_products all(count*groups.size(), count*per_chunk);
        std::vector<ggml_tensor *> stored, scores;  // [chunk][group]
        for (int64_t i = 0; i < count; ++i) {
            for (const auto & g : groups) {
                const auto type = kvf_encoder(g.keys->type).type;
                const auto size = ggml_row_size(type, g.keys->width);
                stored.push_back(all.matrix(g.keys->type, g.keys->width, KVF_BLOCK, 1, g.keys->stride, KVF_BLOCK*g.keys->stride));
                auto * columns = all.matrix(type, g.keys->width, g.count, 1, size, g.count*size);
                columns->data = const_cast<uint8_t *>(g.queries.data());
                scores.push_back(all.multiply(stored.back(), columns));
            }
        }
        for (int64_t next = first; next < last; next += count) {
            const auto c = std::min(next, last - count);  // the last chunks overlap those before
            for (size_t i = 0; i < stored.size(); ++i) {
                stored[i]->data = (uint8_t *) (uintptr_t) record[c + i/groups.size()] + groups[i % groups.size()].keys->offset;
            }
            all.compute();
            for (size_t i = 0; i < scores.size(); ++i) {
                const auto & g  = groups[i % groups.size()];
                const auto * of = (const float *) scores[i]->data;
                for (int64_t j = 0; j < g.count; ++j) {
                    out[(g.first + j)*n + c + i/groups.size()] = log_mass(of + j*KVF_BLOCK, g.keys->scale);
                }
            }
        }
    });
    return 0;
}

}  // namespace

int64_t kvf_index_size(const kvf_engine * engine, int32_t n_units, const kvf_head * units) {
    const auto keys = rows_of_index(engine->layers, n_units, units);
    return keys.empty() ? KVF_E_ARGUMENT : keys.back().offset + KVF_BLOCK*keys.back().stride;
}

int kvf_index_build(const kvf_engine * engine, int32_t n_units, const kvf_head * units, const uint8_t * image,
                    uint8_t * out) {
    const auto keys = rows_of_index(engine->layers, n_units, units);
    if (keys.empty()) {
        return KVF_E_ARGUMENT;
    }
    const auto type     = engine->kv.type_k();
    const auto to_float = ggml_get_type_traits(type)->to_float;
    const auto quantise = ggml_get_type_traits_cpu(INDEX_TYPE)->from_float;
    for (const auto & k : keys) {
        const auto         from = rows_of_image(engine->layers[k.unit.layer], type, k.unit);
        std::vector<float> row(k.width);
        for (int i = 0; i < KVF_BLOCK; ++i) {
            const auto * src = image + from.offset + i*from.stride;
            if (type == GGML_TYPE_F32) {
                std::copy((const float *) src, (const float *) src + k.head_k, row.begin());
            } else {
                to_float(src, row.data(), k.head_k);
            }
            quantise(row.data(), out + k.offset + i*k.stride, k.width);
        }
    }
    return 0;
}

int kvf_index_score(const kvf_engine * engine, int32_t n_units, const kvf_head * units, int32_t n_heads,
                    const kvf_head * heads, int32_t n, const uint64_t * index, int32_t rows, const float * queries,
                    float * out, int32_t n_threads) {
    const auto layers = kvf_layers(engine);
    if (n <= 0 || rows <= 0 || !heads_ok(layers, n_heads, heads, &kvf_layer::n_head)) {
        return KVF_E_ARGUMENT;
    }
    const auto keys = rows_of_index(layers, n_units, units);
    return score(layers, keys, n_heads, heads, n, index, rows, queries, out, n_threads);
}

int kvf_keys_score(const kvf_engine * engine, int32_t n_heads, const kvf_head * heads, int32_t n,
                   const uint64_t * image, int32_t rows, const float * queries, float * out, int32_t n_threads) {
    const auto layers = kvf_layers(engine);
    if (n <= 0 || rows <= 0 || !heads_ok(layers, n_heads, heads, &kvf_layer::n_head)) {
        return KVF_E_ARGUMENT;
    }
    std::vector<key_rows> keys;
    for (int32_t i = 0; i < n_heads; ++i) {
        const auto & l    = layers[heads[i].layer];
        const auto   unit = unit_of(l, heads[i]);
        if (keys.empty() || precedes(keys.back().unit, unit)) {
            keys.push_back(rows_of_image(l, engine->kv.type_k(), unit));
        }
    }
    return score(layers, keys, n_heads, heads, n, image, rows, queries, out, n_threads);
}
