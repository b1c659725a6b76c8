// Scores chunks against queries from bounds of their keys.
#include "kvf_engine.h"
#include "kvf_products.h"

#include <limits>

namespace {

constexpr int64_t SLICE = 64;  // chunks whose bounds are multiplied at once: the scores of a slice stay in the cache

// The query rows of a layer in the type that the stored rows are multiplied with, those of one KV head side by side.
struct layer_queries {
    ggml_type            type;
    int64_t              width;
    int64_t              count;    // per KV head
    int64_t              n_head_kv;
    std::vector<uint8_t> data;
    std::vector<float *> out;      // [n_head_kv*count] where the scores of each go: [n]
};

// Multiplied with [largest, -smallest], this gives the largest score any key within the bounds can reach.
void split_signs(const float * query, int64_t width, float * out) {
    for (int64_t i = 0; i < width; ++i) {
        out[i]         = std::max(query[i], 0.0f);
        out[width + i] = std::max(-query[i], 0.0f);
    }
}

ggml_type bounds_type(const kvf_layer & l) {
    return 2*l.head_k % ggml_blck_size(GGML_TYPE_Q8_0) == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_F16;
}

size_t bounds_row(const kvf_layer & l) {
    return ggml_row_size(bounds_type(l), 2*l.head_k);
}

layer_queries encode_queries(const kvf_layer & l, int32_t rows, const float *& queries, float *& out, int32_t n) {
    const kvf_encoder encode(bounds_type(l));
    const int64_t     width = 2*l.head_k;
    const auto        size  = ggml_row_size(encode.type, width);
    const auto        heads = l.n_head/l.n_head_kv;  // that share a KV head
    layer_queries res { encode.type, width, rows*heads, l.n_head_kv, {}, {} };
    res.data.resize(size*rows*l.n_head);
    res.out.resize(rows*l.n_head);
    std::vector<float> split(width);
    for (int32_t i = 0; i < rows*l.n_head; ++i) {
        const int32_t row  = i/l.n_head;
        const int32_t head = i % l.n_head;
        const auto    at   = head/heads*res.count + row*heads + head % heads;
        split_signs(queries, l.head_k, split.data());
        encode(split.data(), width, res.data.data() + at*size);
        res.out[at] = out;
        queries += l.head_k;
        out     += n;
    }
    return res;
}

bool group_ok(int32_t group) {
    return group > 0 && KVF_BLOCK % group == 0;
}

}  // namespace

int64_t kvf_bounds_size(const kvf_engine * engine, int32_t group) {
    if (!group_ok(group)) {
        return KVF_E_ARGUMENT;
    }
    int64_t size = 0;
    for (const auto & l : engine->layers) {
        size += bounds_row(l)*l.n_head_kv*(KVF_BLOCK/group);
    }
    return size;
}

int kvf_bounds(const kvf_engine * engine, int32_t group, const uint8_t * image, uint8_t * out) {
    if (!group_ok(group)) {
        return KVF_E_ARGUMENT;
    }
    const auto stored   = engine->kv.type_k();
    const auto to_float = ggml_get_type_traits(stored)->to_float;
    for (const auto & l : engine->layers) {
        const int64_t width = l.n_head_kv*l.head_k;
        std::vector<float> row(width), most(width), least(width), both(2*l.head_k);
        const auto from_float = ggml_get_type_traits_cpu(bounds_type(l))->from_float;
        // [KV head][group], so that the groups of a head lie side by side
        for (int32_t g = 0; g < KVF_BLOCK/group; ++g) {
            std::fill(most.begin(), most.end(), -std::numeric_limits<float>::infinity());
            std::fill(least.begin(), least.end(), std::numeric_limits<float>::infinity());
            for (int32_t i = g*group; i < (g + 1)*group; ++i) {
                const auto * src = image + l.k_offset + i*l.k_row;
                if (stored == GGML_TYPE_F32) {
                    std::copy((const float *) src, (const float *) src + width, row.begin());
                } else {
                    to_float(src, row.data(), width);
                }
                for (int64_t j = 0; j < width; ++j) {
                    most[j]  = std::max(most[j], row[j]);
                    least[j] = std::min(least[j], row[j]);
                }
            }
            for (int32_t h = 0; h < l.n_head_kv; ++h) {
                for (int32_t j = 0; j < l.head_k; ++j) {
                    both[j]            = most[h*l.head_k + j];
                    both[l.head_k + j] = -least[h*l.head_k + j];
                }
                from_float(both.data(), out + (h*(KVF_BLOCK/group) + g)*bounds_row(l), 2*l.head_k);
            }
        }
        out += bounds_row(l)*l.n_head_kv*(KVF_BLOCK/group);
    }
    return 0;
}

int kvf_bounds_score(const kvf_engine * engine, int32_t group, int32_t n, const uint8_t * bounds,
                     int32_t rows, const float * queries, float * out, int32_t n_threads) {
    if (!group_ok(group) || n <= 0 || rows <= 0) {
        return KVF_E_ARGUMENT;
    }
    const auto shapes = kvf_layers(engine);
    std::vector<layer_queries> layers;
    int64_t n_columns = 0;
    for (const auto & l : shapes) {
        layers.push_back(encode_queries(l, rows, queries, out, n));
        n_columns += rows*l.n_head;
    }
    const int64_t size   = kvf_bounds_size(engine, group);
    const int32_t groups = KVF_BLOCK/group;
    kvf_in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        const auto count = std::min(SLICE, last - first);
        kvf_products all(layers.size()*groups, n_columns*groups*count);
        std::vector<ggml_tensor *> stored, scores;  // [layer][group]
        std::vector<size_t>        offset;
        size_t at = 0;
        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l   = shapes[i];
            const auto   row = bounds_row(l);
            const auto & q   = layers[i];
            const auto   len = ggml_row_size(q.type, q.width);
            auto * queries = all.matrix(q.type, q.width, q.count, l.n_head_kv, len, q.count*len);
            queries->data = const_cast<uint8_t *>(q.data.data());
            for (int32_t g = 0; g < groups; ++g) {
                stored.push_back(all.matrix(bounds_type(l), 2*l.head_k, count, l.n_head_kv, size, groups*row));
                scores.push_back(all.multiply(stored.back(), queries));
                offset.push_back(at + g*row);
            }
            at += row*l.n_head_kv*groups;
        }
        for (int64_t next = first; next < last; next += count) {
            const auto c = std::min(next, last - count);  // the last slice overlaps the one before
            for (size_t i = 0; i < stored.size(); ++i) {
                stored[i]->data = const_cast<uint8_t *>(bounds + c*size + offset[i]);
            }
            all.compute();
            for (size_t i = 0; i < layers.size(); ++i) {
                for (size_t j = 0; j < layers[i].out.size(); ++j) {
                    auto * best = layers[i].out[j] + c;
                    for (int32_t g = 0; g < groups; ++g) {
                        const auto * score = (const float *) scores[i*groups + g]->data + j*count;
                        for (int64_t k = 0; k < count; ++k) {
                            const float scaled = shapes[i].scale*score[k];
                            best[k] = g == 0 ? scaled : std::max(best[k], scaled);
                        }
                    }
                }
            }
        }
    });
    return 0;
}
