// Matrix products on the host, for scoring: on the calling thread, beside whatever the device computes.
#pragma once

#include "ggml-cpp.h"
#include "kvf_cpu.h"

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

// A value row in the type that rows of type `stored` are multiplied with.
struct kvf_encoder {
    explicit kvf_encoder(ggml_type stored) : type(kvf_cpu_backend().type_traits(stored)->vec_dot_type) {}

    void operator()(const float * row, int64_t width, uint8_t * out) const {
        if (type == GGML_TYPE_F32) {
            std::copy(row, row + width, (float *) out);
        } else {
            kvf_cpu_backend().type_traits(type)->from_float(row, out, width);
        }
    }

    ggml_type type;
};

// Products of stored rows and queries. ggml multiplies whole matrices faster than row by row: what it has loaded of a row
// serves several queries. Made once, and computed again wherever the next rows are.
class kvf_products {
public:
    // n products, each with its soft_max or without, of n_values values together
    kvf_products(size_t n, size_t n_values) :
        ctx(ggml_init({ 4*n*(ggml_tensor_overhead() + GGML_MEM_ALIGN) + ggml_graph_overhead_custom(4*n, false)
                             + n_values*sizeof(float), nullptr, false })),
        graph(ggml_new_graph_custom(ctx.get(), 4*n, false)) {}

    // Only the shape, n_head matrices of n rows: the memory belongs to others, and is there when products are computed.
    ggml_tensor * matrix(ggml_type type, int64_t width, int64_t n, int64_t n_head, size_t row_stride,
                         size_t head_stride) {
        ggml_set_no_alloc(ctx.get(), true);
        auto * res = ggml_new_tensor_3d(ctx.get(), type, width, n, n_head);
        ggml_set_no_alloc(ctx.get(), false);
        res->nb[1] = row_stride;
        res->nb[2] = head_stride;
        res->nb[3] = n_head*head_stride;
        return res;
    }

    // [rows, queries, n_head]
    ggml_tensor * multiply(ggml_tensor * rows, ggml_tensor * queries) {
        return result(ggml_mul_mat(ctx.get(), rows, queries));
    }

    ggml_tensor * soft_max(ggml_tensor * scores, float scale) {
        return result(ggml_soft_max_ext(ctx.get(), scores, nullptr, scale, 0.0f));
    }

    void compute() {
        const auto & cpu  = kvf_cpu_backend();
        auto         plan = cpu.graph_plan(graph, 1, nullptr);
        work.resize(std::max(work.size(), plan.work_size));
        plan.work_data = work.data();
        cpu.graph_compute(graph, &plan);
    }

private:
    ggml_tensor * result(ggml_tensor * tensor) {
        ggml_build_forward_expand(graph, tensor);
        return tensor;
    }

    ggml_context_ptr     ctx;
    ggml_cgraph *        graph;
    std::vector<uint8_t> work;
};

// Calls work(first, last) for parts of [0, n), none of them empty, on so many threads.
template <typename F>
void kvf_in_parallel(int32_t n, int32_t n_threads, F && work) {
    n_threads = std::clamp(n_threads, 1, std::max(n, 1));
    const auto part = [&work, n, n_threads](int32_t t) { work(n*(int64_t) t/n_threads, n*(int64_t) (t + 1)/n_threads); };
    std::vector<std::thread> threads;
    int32_t next = 1;
    try {
        for (; next < n_threads; ++next) {
            threads.emplace_back(part, next);
        }
    } catch (const std::exception &) {  // the system has no more threads: this one does their work
    }
    part(0);
    for (; next < n_threads; ++next) {
        part(next);
    }
    for (auto & thread : threads) {
        thread.join();
    }
}
