// Scores chunks against queries from what the host holds: bounds of their keys, or the keys themselves.
#include "kvf_engine.h"

#include "ggml-cpp.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <thread>

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

layer_queries encode_queries(const kvf_layer & l, ggml_type stored, int64_t width, encode_query encode, int32_t rows,
                             const float *& queries, float *& out, int32_t n) {
    const auto   type   = ggml_get_type_traits_cpu(stored)->vec_dot_type;
    const auto   size   = ggml_row_size(type, width);
    const auto * traits = ggml_get_type_traits_cpu(type);
    const auto   heads  = l.n_head/l.n_head_kv;  // that share a KV head
    layer_queries res { type, width, rows*heads, l.n_head_kv, {}, {} };
    res.data.resize(size*rows*l.n_head);
    res.out.resize(rows*l.n_head);
    std::vector<float> encoded(width);
    for (int32_t i = 0; i < rows*l.n_head; ++i) {
        const int32_t row  = i/l.n_head;
        const int32_t head = i % l.n_head;
        const auto    at   = head/heads*res.count + row*heads + head % heads;
        auto * data = res.data.data() + at*size;
        encode(queries, l.head_k, encoded.data());
        if (type == GGML_TYPE_F32) {
            std::copy(encoded.begin(), encoded.end(), (float *) data);
        } else {
            traits->from_float(encoded.data(), data, width);
        }
        res.out[at] = out;
        queries += l.head_k;
        out     += n;
    }
    return res;
}

// Products of stored rows and queries, on the calling thread. ggml multiplies whole matrices faster than row by row: what it
// has loaded of a row serves several queries. Made once, and computed again wherever the next rows are.
class products {
  public:
    products(size_t n, size_t n_scores) :
        ctx_(ggml_init({ 4*n*(ggml_tensor_overhead() + GGML_MEM_ALIGN) + ggml_graph_overhead_custom(4*n, false)
                             + n_scores*sizeof(float), nullptr, false })),
        graph_(ggml_new_graph_custom(ctx_.get(), 4*n, false)) {}

    // Stored rows of each KV head; `data` is set before they are multiplied.
    ggml_tensor * rows(ggml_type type, const layer_queries & q, int64_t n, size_t row_stride, size_t head_stride) {
        return matrix(type, q.width, n, q.n_head_kv, row_stride, head_stride);
    }

    // [n, count, n_head_kv]
    ggml_tensor * scores(ggml_tensor * rows, const layer_queries & q) {
        const auto size    = ggml_row_size(q.type, q.width);
        auto *     queries = matrix(q.type, q.width, q.count, q.n_head_kv, size, q.count*size);
        queries->data = const_cast<uint8_t *>(q.data.data());
        return result(ggml_mul_mat(ctx_.get(), rows, queries));
    }

    ggml_tensor * soft_max(ggml_tensor * scores, float scale) {
        return result(ggml_soft_max_ext(ctx_.get(), scores, nullptr, scale, 0.0f));
    }

    void compute() {
        auto plan = ggml_graph_plan(graph_, 1, nullptr);
        work_.resize(std::max(work_.size(), plan.work_size));
        plan.work_data = work_.data();
        ggml_graph_compute(graph_, &plan);
    }

  private:
    // Only the shape: the memory belongs to others.
    ggml_tensor * matrix(ggml_type type, int64_t width, int64_t n, int64_t n_head, size_t row_stride,
                         size_t head_stride) {
        ggml_set_no_alloc(ctx_.get(), true);
        auto * res = ggml_new_tensor_3d(ctx_.get(), type, width, n, n_head);
        ggml_set_no_alloc(ctx_.get(), false);
        res->nb[1] = row_stride;
        res->nb[2] = head_stride;
        res->nb[3] = n_head*head_stride;
        return res;
    }

    ggml_tensor * result(ggml_tensor * tensor) {
        ggml_build_forward_expand(graph_, tensor);
        return tensor;
    }

    ggml_context_ptr     ctx_;
    ggml_cgraph *        graph_;
    std::vector<uint8_t> work_;
};

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

float largest(const float * x, int32_t n) {
    constexpr int32_t LANES = 8;  // of their own, or each comparison would wait for the one before
    static_assert(KVF_BLOCK % LANES == 0);
    float most[LANES];
    std::copy(x, x + LANES, most);
    for (int32_t i = LANES; i < n; i += LANES) {
        for (int32_t j = 0; j < LANES; ++j) {
            most[j] = std::max(most[j], x[i + j]);
        }
    }
    return *std::max_element(most, most + LANES);
}

std::vector<kvf_layer> layers_of(const kvf_engine * engine) {
    std::vector<kvf_layer> res(engine->layers.size());
    kvf_get_layers(engine, res.data(), res.size());  // with the scale of the newest graph
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
    const auto shapes = layers_of(engine);
    std::vector<layer_queries> layers;
    int64_t n_columns = 0;
    for (const auto & l : shapes) {
        layers.push_back(encode_queries(l, bounds_type(l), 2*l.head_k, split_signs, rows, queries, out, n));
        n_columns += rows*l.n_head;
    }
    const int64_t size   = kvf_bounds_size(engine, group);
    const int32_t groups = KVF_BLOCK/group;
    in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        const auto count = std::min(SLICE, last - first);
        products all(layers.size()*groups, n_columns*groups*count);
        std::vector<ggml_tensor *> stored, scores;  // [layer][group]
        std::vector<size_t>        offset;
        size_t at = 0;
        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l   = shapes[i];
            const auto   row = bounds_row(l);
            for (int32_t g = 0; g < groups; ++g) {
                stored.push_back(all.rows(bounds_type(l), layers[i], count, size, groups*row));
                scores.push_back(all.scores(stored.back(), layers[i]));
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

int kvf_keys_score(const kvf_engine * engine, int32_t n, const uint64_t * image,
                   int32_t rows, const float * queries, float * out, int32_t n_threads) {
    if (n <= 0 || rows <= 0) {
        return KVF_E_ARGUMENT;
    }
    const auto type   = engine->kv.type_k();
    const auto shapes = layers_of(engine);
    std::vector<layer_queries> layers;
    int64_t n_columns = 0;
    for (const auto & l : shapes) {
        layers.push_back(encode_queries(l, type, l.head_k, plain, rows, queries, out, n));
        n_columns += rows*l.n_head;
    }
    in_parallel(n, n_threads, [&](int64_t first, int64_t last) {
        products all(layers.size(), 2*n_columns*KVF_BLOCK);
        std::vector<ggml_tensor *> keys, scores, shares;
        for (size_t i = 0; i < layers.size(); ++i) {
            const auto & l = shapes[i];
            keys.push_back(all.rows(type, layers[i], KVF_BLOCK, l.k_row, ggml_row_size(type, l.head_k)));
            scores.push_back(all.scores(keys.back(), layers[i]));
            shares.push_back(all.soft_max(scores.back(), l.scale));
        }
        for (int64_t c = first; c < last; ++c) {
            for (size_t i = 0; i < layers.size(); ++i) {
                keys[i]->data = (uint8_t *) (uintptr_t) image[c] + shapes[i].k_offset;
            }
            all.compute();
            for (size_t i = 0; i < layers.size(); ++i) {
                for (size_t j = 0; j < layers[i].out.size(); ++j) {
                    // the share of the best key is 1/sum(exp(score - most))
                    const float most  = largest((const float *) scores[i]->data + j*KVF_BLOCK, KVF_BLOCK);
                    const float share = largest((const float *) shares[i]->data + j*KVF_BLOCK, KVF_BLOCK);
                    layers[i].out[j][c] = shapes[i].scale*most - std::log(share);
                }
            }
        }
    });
    return 0;
}
