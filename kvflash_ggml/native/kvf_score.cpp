// Scores chunks against queries from what the host holds: bounds of their keys, or the keys themselves.
#include "kvf_engine.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

namespace {

// One query head against one KV head of a layer; `data` is in the type that the stored rows are multiplied with.
struct column {
    const uint8_t * data;
    float *         out;  // [n]
    int32_t         head_kv;
};

struct layer_columns {
    std::vector<uint8_t> data;
    std::vector<column>  columns;
};

using encode_query = void (*)(const float * query, int64_t width, float * out);

void plain(const float * query, int64_t width, float * out) {
    std::copy(query, query + width, out);
}

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

layer_columns make_columns(const kvf_layer & l, ggml_type stored, int64_t width, encode_query encode, int32_t rows,
                           const float *& queries, float *& out, int32_t n) {
    const auto   type   = ggml_get_type_traits_cpu(stored)->vec_dot_type;
    const auto   size   = ggml_row_size(type, width);
    const auto * traits = ggml_get_type_traits_cpu(type);
    layer_columns res;
    res.data.resize(size*rows*l.n_head);
    std::vector<float> encoded(width);
    for (int32_t i = 0; i < rows*l.n_head; ++i) {
        auto * data = res.data.data() + i*size;
        encode(queries, l.head_k, encoded.data());
        if (type == GGML_TYPE_F32) {
            std::copy(encoded.begin(), encoded.end(), (float *) data);
        } else {
            traits->from_float(encoded.data(), data, width);
        }
        res.columns.push_back({ data, out, (i % l.n_head)/(l.n_head/l.n_head_kv) });
        queries += l.head_k;
        out     += n;
    }
    return res;
}

template <typename F>
void in_parallel(int32_t n, int32_t n_threads, F && work) {
    n_threads = std::clamp(n_threads, 1, std::max(n, 1));
    std::vector<std::thread> threads;
    for (int32_t t = 1; t < n_threads; ++t) {
        threads.emplace_back([&work, n, n_threads, t] { work(n*(int64_t) t/n_threads, n*(int64_t) (t + 1)/n_threads); });
    }
    work(0, n/n_threads);
    for (auto & thread : threads) {
        thread.join();
    }
}

float log_sum_exp(const float * x, int32_t n) {
    constexpr float NEGLIGIBLE = 12.0f;  // e^-12 of the largest term, times a block, changes nothing a score is used for
    const float most = *std::max_element(x, x + n);
    float sum = 0.0f;
    for (int32_t i = 0; i < n; ++i) {
        if (x[i] > most - NEGLIGIBLE) {
            sum += std::exp(x[i] - most);
        }
    }
    return most + std::log(sum);
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
    std::vector<layer_columns> layers;
    for (const auto & l : engine->layers) {
        layers.push_back(make_columns(l, bounds_type(l), 2*l.head_k, split_signs, rows, queries, out, n));
    }
    const int64_t size   = kvf_bounds_size(engine, group);
    const int32_t groups = KVF_BLOCK/group;
    in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        for (int64_t c = first; c < last; ++c) {
            const auto * at = bounds + c*size;
            for (size_t i = 0; i < layers.size(); ++i) {
                const auto & l      = engine->layers[i];
                const auto   vec_dot = ggml_get_type_traits_cpu(bounds_type(l))->vec_dot;
                const auto   row    = bounds_row(l);
                for (const auto & column : layers[i].columns) {
                    float best = -std::numeric_limits<float>::infinity();
                    for (int32_t g = 0; g < groups; ++g) {
                        float dot;
                        vec_dot(2*l.head_k, &dot, 0, at + (column.head_kv*groups + g)*row, 0, column.data, 0, 1);
                        best = std::max(best, dot);
                    }
                    column.out[c] = best;
                }
                at += row*l.n_head_kv*groups;
            }
        }
    });
    return 0;
}

int kvf_keys_score(const kvf_engine * engine, int32_t n, const uint64_t * image,
                   int32_t rows, const float * queries, float * out, int32_t n_threads) {
    if (n <= 0 || rows <= 0) {
        return KVF_E_ARGUMENT;
    }
    const auto stored  = engine->kv.type_k();
    const auto vec_dot = ggml_get_type_traits_cpu(stored)->vec_dot;
    std::vector<kvf_layer> shapes(engine->layers.size());
    kvf_get_layers(engine, shapes.data(), shapes.size());
    std::vector<layer_columns> layers;
    for (const auto & l : shapes) {
        layers.push_back(make_columns(l, stored, l.head_k, plain, rows, queries, out, n));
    }
    in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        float scores[KVF_BLOCK];
        for (int64_t c = first; c < last; ++c) {
            for (size_t i = 0; i < layers.size(); ++i) {
                const auto & l    = shapes[i];
                const auto   head = ggml_row_size(stored, l.head_k);
                const auto * keys = (const uint8_t *) (uintptr_t) image[c] + l.k_offset;
                for (const auto & column : layers[i].columns) {
                    for (int32_t r = 0; r < KVF_BLOCK; ++r) {
                        vec_dot(l.head_k, &scores[r], 0, keys + r*l.k_row + column.head_kv*head, 0, column.data, 0, 1);
                        scores[r] *= l.scale;
                    }
                    column.out[c] = log_sum_exp(scores, KVF_BLOCK);
                }
            }
        }
    });
    return 0;
}
