// Attention mass of chunks: from the index, which holds the keys of some KV heads at 4 bits, or from page images.
#include "kvf_index.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_products.h"

#include <cmath>

namespace {

constexpr int64_t AT_ONCE  = 1 << 15;  // scores of one graph: they stay in the cache, and several chunks share its cost
constexpr int64_t A_THREAD = 1 << 21;  // multiplications of each thread: 0.3 ms, a tenth of which it takes to begin

bool precedes(const kvf_head & a, const kvf_head & b) {
    return a.layer < b.layer || (a.layer == b.layer && a.head < b.head);
}

kvf_status check_score(const std::vector<kvf_layer> & layers, int32_t n_heads, const kvf_head * heads, int32_t n,
                       int32_t rows) {
    if (n <= 0 || rows <= 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d chunks to score for %d queries a head", n, rows);
    }
    return kvf_check_heads(layers, n_heads, heads, &kvf_layer::n_head);
}

kvf_head unit_of(const kvf_layer & l, const kvf_head & head) {
    return { head.layer, head.head/(l.n_head/l.n_head_kv) };
}

kvf_key_rows rows_of_image(const kvf_layer & l, ggml_type type, const kvf_head & unit) {
    const auto offset = l.k_offset + unit.head*ggml_row_size(type, l.head_k);
    return { unit, l.scale, l.head_k, l.head_k, type, offset, (size_t) l.k_row };
}

void to_floats(ggml_type type, const uint8_t * src, float * out, int64_t n) {
    if (type == GGML_TYPE_F32) {
        std::copy_n((const float *) src, n, out);
    } else {
        ggml_get_type_traits(type)->to_float(src, out, n);
    }
}

float largest(const float * x) {
    constexpr int LANES = 8;  // of their own, or each comparison would wait for the one before
    static_assert(KVF_BLOCK % LANES == 0);
    float most[LANES];
    std::copy(x, x + LANES, most);
    for (int i = LANES; i < KVF_BLOCK; i += LANES) {
        for (int j = 0; j < LANES; ++j) {
            most[j] = std::max(most[j], x[i + j]);
        }
    }
    return *std::max_element(most, most + LANES);
}

// The mass of one chunk for one query: without a graph, which takes longer to build than to compute for one query a head.
float mass_of(const kvf_key_rows & k, const uint8_t * keys, const uint8_t * query, ggml_vec_dot_t dot) {
    float scores[KVF_BLOCK];
    for (int i = 0; i < KVF_BLOCK; ++i) {
        dot(k.width, scores + i, 0, keys + i*k.stride, 0, query, 0, 1);
    }
    const float most = largest(scores);
    float       sum  = 0.0f;
    for (const float x : scores) {
        sum += std::exp(k.scale*(x - most));
    }
    return k.scale*most + std::log(sum);
}

// The queries of each group, one behind the other, in the type that its keys are multiplied with.
std::vector<std::vector<uint8_t>> encoded(const std::vector<kvf_column_group> & groups, const float * queries) {
    std::vector<std::vector<uint8_t>> res;
    for (const auto & g : groups) {
        const auto &       k = *g.keys;
        const kvf_encoder  encode(k.type);
        const auto         size = ggml_row_size(encode.type, k.width);
        std::vector<float> padded(k.width, 0.0f);
        auto &             out = res.emplace_back(g.count*size);
        for (int64_t j = 0; j < g.count; ++j, queries += k.head_k) {
            std::copy(queries, queries + k.head_k, padded.begin());
            encode(padded.data(), k.width, out.data() + j*size);
        }
    }
    return res;
}

kvf_status score(const std::vector<kvf_layer> & layers, const std::vector<kvf_key_rows> & keys, int32_t n_heads,
                 const kvf_head * heads, int32_t n, const uint64_t * record, int32_t rows, const float * queries,
                 float * out, int32_t n_threads) {
    const auto groups = kvf_group_columns(layers, keys, n_heads, heads, rows);
    if (groups.empty()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the index lacks the KV head of a query head");
    }
    const auto    asked     = encoded(groups, queries);
    const int64_t per_chunk = (int64_t) n_heads*rows*KVF_BLOCK;
    n_threads = std::clamp<int64_t>(n*per_chunk*groups.front().keys->width/A_THREAD, 1, n_threads);
    kvf_in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        for (size_t i = 0; rows == 1 && i < groups.size(); ++i) {
            const auto & g    = groups[i];
            const auto   dot  = kvf_cpu_backend().type_traits(g.keys->type)->vec_dot;
            const auto   size = asked[i].size()/g.count;
            for (int64_t c = first; c < last; ++c) {
                for (int64_t j = 0; j < g.count; ++j) {
                    const auto * stored = (const uint8_t *) (uintptr_t) record[c] + g.keys->offset;
                    out[(g.first + j)*n + c] = mass_of(*g.keys, stored, asked[i].data() + j*size, dot);
                }
            }
        }
        if (rows == 1) {
            return;
        }
        const auto   count = std::clamp<int64_t>(AT_ONCE/per_chunk, 1, last - first);
        kvf_products all(count*groups.size(), 2*count*per_chunk);
        std::vector<ggml_tensor *> stored, scores, shares;  // [chunk][group]
        for (int64_t i = 0; i < count; ++i) {
            for (size_t j = 0; j < groups.size(); ++j) {
                const auto & g    = groups[j];
                const auto & k    = *g.keys;
                const auto   type = kvf_encoder(k.type).type;
                const auto   size = ggml_row_size(type, k.width);
                auto * query = all.matrix(type, k.width, g.count, 1, size, g.count*size);
                query->data  = const_cast<uint8_t *>(asked[j].data());
                stored.push_back(all.matrix(k.type, k.width, KVF_BLOCK, 1, k.stride, KVF_BLOCK*k.stride));
                scores.push_back(all.multiply(stored.back(), query));
                shares.push_back(all.soft_max(scores.back(), k.scale));
            }
        }
        for (int64_t next = first; next < last; next += count) {
            const auto c = std::min(next, last - count);  // the last chunks overlap those before
            for (size_t i = 0; i < stored.size(); ++i) {
                const auto & g  = groups[i % groups.size()];
                stored[i]->data = (uint8_t *) (uintptr_t) record[c + i/groups.size()] + g.keys->offset;
            }
            all.compute();
            for (size_t i = 0; i < stored.size(); ++i) {
                const auto & g = groups[i % groups.size()];
                for (int64_t j = 0; j < g.count; ++j) {
                    // the share of the best key is 1/sum(exp(score - most))
                    const float most  = largest((const float *) scores[i]->data + j*KVF_BLOCK);
                    const float share = largest((const float *) shares[i]->data + j*KVF_BLOCK);
                    out[(g.first + j)*n + c + i/groups.size()] = g.keys->scale*most - std::log(share);
                }
            }
        }
    });
    return KVF_STATUS_SUCCESS;
}

}  // namespace

kvf_status kvf_check_index(const std::vector<kvf_layer> & layers, int32_t n_units, const kvf_head * units, int32_t n_heads,
                           const kvf_head * heads, int32_t n, int32_t rows) {
    if (const auto status = check_score(layers, n_heads, heads, n, rows)) {
        return status;
    }
    return kvf_check_heads(layers, n_units, units, &kvf_layer::n_head_kv);
}

std::vector<kvf_key_rows> kvf_rows_of_index(const std::vector<kvf_layer> & layers, int32_t n_units, const kvf_head * units) {
    std::vector<kvf_key_rows> res;
    size_t offset = 0;
    for (int32_t i = 0; i < n_units; ++i) {
        const auto & l      = layers[units[i].layer];
        const auto   width  = GGML_PAD(l.head_k, ggml_blck_size(KVF_INDEX_TYPE));
        const auto   stride = ggml_row_size(KVF_INDEX_TYPE, width);
        res.push_back({ units[i], l.scale, l.head_k, width, KVF_INDEX_TYPE, offset, stride });
        offset += KVF_BLOCK*stride;
    }
    return res;
}

std::vector<kvf_column_group> kvf_group_columns(const std::vector<kvf_layer> & layers, const std::vector<kvf_key_rows> & keys,
                                                int32_t n_heads, const kvf_head * heads, int32_t rows) {
    std::vector<kvf_column_group> res;
    auto                          next = keys.begin();
    for (int32_t i = 0; i < n_heads; ++i) {
        const auto unit = unit_of(layers[heads[i].layer], heads[i]);
        while (next != keys.end() && precedes(next->unit, unit)) {
            ++next;
        }
        if (next == keys.end() || precedes(unit, next->unit)) {
            return {};
        }
        if (res.empty() || res.back().keys != &*next) {
            res.push_back({ &*next, (int64_t) i*rows, 0 });
        }
        res.back().count += rows;
    }
    return res;
}

kvf_status kvf_check_heads(const std::vector<kvf_layer> & layers, int32_t n, const kvf_head * heads,
                           int32_t kvf_layer::*n_head) {
    const char * kind = n_head == &kvf_layer::n_head ? "query" : "KV";
    if (n <= 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no %s heads", kind);
    }
    const int32_t n_layers = layers.size();
    for (int32_t i = 0; i < n; ++i) {
        const auto & x = heads[i];
        if (x.layer < 0 || x.layer >= n_layers) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "a %s head of layer %d of %d", kind, x.layer, n_layers);
        }
        if (x.head < 0 || x.head >= layers[x.layer].*n_head) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "%s head %d of %d in layer %d", kind, x.head, layers[x.layer].*n_head,
                            x.layer);
        }
        if (i > 0 && !precedes(heads[i - 1], x)) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "%s head (%d, %d) does not follow the one before", kind, x.layer, x.head);
        }
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_size(const kvf_engine * engine, int32_t n_units, const kvf_head * units, int64_t * size) {
    if (const auto status = kvf_check_heads(engine->layers, n_units, units, &kvf_layer::n_head_kv)) {
        return status;
    }
    const auto last = kvf_rows_of_index(engine->layers, n_units, units).back();
    *size = last.offset + KVF_BLOCK*last.stride;
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_build(const kvf_engine * engine, int32_t n_units, const kvf_head * units, const uint8_t * image,
                           uint8_t * out) {
    if (const auto status = kvf_check_heads(engine->layers, n_units, units, &kvf_layer::n_head_kv)) {
        return status;
    }
    const auto keys     = kvf_rows_of_index(engine->layers, n_units, units);
    const auto type     = engine->kv.type_k();
    const auto quantise = kvf_cpu_backend().type_traits(KVF_INDEX_TYPE)->from_float;
    for (const auto & k : keys) {
        const auto         from = rows_of_image(engine->layers[k.unit.layer], type, k.unit);
        std::vector<float> row(k.width);
        for (int i = 0; i < KVF_BLOCK; ++i) {
            to_floats(type, image + from.offset + i*from.stride, row.data(), k.head_k);
            quantise(row.data(), out + k.offset + i*k.stride, k.width);
        }
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_keys_read(const kvf_engine * engine, const kvf_head * unit, const uint8_t * image, float * out) {
    if (const auto status = kvf_check_heads(engine->layers, 1, unit, &kvf_layer::n_head_kv)) {
        return status;
    }
    const auto from = rows_of_image(engine->layers[unit->layer], engine->kv.type_k(), *unit);
    for (int i = 0; i < KVF_BLOCK; ++i) {
        to_floats(from.type, image + from.offset + i*from.stride, out + i*from.head_k, from.head_k);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_score(const kvf_engine * engine, int32_t n_units, const kvf_head * units, int32_t n_heads,
                           const kvf_head * heads, int32_t n, const uint64_t * index, int32_t rows,
                           const float * queries, float * out, int32_t n_threads) {
    const auto layers = kvf_layers(*engine);
    if (const auto status = kvf_check_index(layers, n_units, units, n_heads, heads, n, rows)) {
        return status;
    }
    const auto keys = kvf_rows_of_index(layers, n_units, units);
    return score(layers, keys, n_heads, heads, n, index, rows, queries, out, n_threads);
}

kvf_status kvf_keys_score(const kvf_engine * engine, int32_t n_heads, const kvf_head * heads, int32_t n,
                          const uint64_t * image, int32_t rows, const float * queries, float * out, int32_t n_threads) {
    const auto layers = kvf_layers(*engine);
    if (const auto status = check_score(layers, n_heads, heads, n, rows)) {
        return status;
    }
    std::vector<kvf_key_rows> keys;
    for (int32_t i = 0; i < n_heads; ++i) {
        const auto & l    = layers[heads[i].layer];
        const auto   unit = unit_of(l, heads[i]);
        if (keys.empty() || precedes(keys.back().unit, unit)) {
            keys.push_back(rows_of_image(l, engine->kv.type_k(), unit));
        }
    }
    return score(layers, keys, n_heads, heads, n, image, rows, queries, out, n_threads);
}
