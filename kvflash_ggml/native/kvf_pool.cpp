#include "kvf_pool.h"

#include "llama-graph.h"
#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace {

struct pool_request {
    uint32_t cells      = 0;
    uint32_t query_rows = 0;
};

// llama_context_params is passed by value from Python, so its layout cannot carry the request
thread_local pool_request next_pool;

uint32_t rows_in_batch(const kvf_pool & pool, const llama_ubatch & ubatch) {
    return std::min(pool.query_rows, ubatch.n_tokens);
}

// Tells the graph which row of the ring each of the newest tokens takes.
class query_index_input : public llm_graph_input_i {
public:
    query_index_input(const kvf_pool & pool, ggml_tensor * index) : pool(pool), index(index) {}

    void set_input(const llama_ubatch * ubatch) override {
        const auto m    = index->ne[0];
        auto *     data = (int64_t *) index->data;
        for (int64_t i = 0; i < m; ++i) {
            data[i] = ubatch->pos[ubatch->n_tokens - m + i] % pool.query_rows;
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        return index->ne[0] == rows_in_batch(pool, params.ubatch);
    }

private:
    const kvf_pool & pool;
    ggml_tensor *    index;
};

// The persistent tensor of a layer is made when the first graph is built, that is, while the context reserves its memory.
ggml_tensor * query_rows(kvf_pool & pool, int il, int64_t width, float scale, ggml_backend_buffer_type_t buft) {
    auto it = pool.queries.find(il);
    if (it == pool.queries.end()) {
        ggml_context_ptr ctx { ggml_init({ ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
        auto * rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, width, pool.query_rows);
        ggml_backend_buffer_ptr buffer { ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft) };
        if (!buffer) {
            throw std::runtime_error("failed to allocate the query rows");
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
        it = pool.queries.emplace(il, kvf_query { std::move(ctx), std::move(buffer), rows, scale }).first;
    }
    return it->second.rows;
}

}  // namespace

void kvf_set_pool(uint32_t cells, uint32_t query_rows) {
    next_pool = { cells, query_rows };
}

std::shared_ptr<kvf_pool> kvf_pool_create(llama_kv_cache & kv, uint32_t & kv_size) {
    if (next_pool.cells == 0) {
        return nullptr;
    }
    if (kv.get_n_stream() != 1) {
        throw std::runtime_error("a pool holds one sequence: n_seq_max must be 1");
    }
    kv_size = std::min(kv_size, next_pool.cells);
    return std::make_shared<kvf_pool>(kv, next_pool.query_rows);
}

bool kvf_plan_slots(const kvf_pool & pool, const llama_ubatch & ubatch, llama_kv_cache::slot_info & res) {
    const auto * plan = pool.plan;
    if (!plan) {
        LLAMA_LOG_ERROR("%s: this context is paged: it can only be decoded through its session\n", __func__);
        return false;
    }
    // batch_idxs maps back to the caller's batch however the memory has split it
    const auto & from = ubatch.data->batch_idxs;
    res.s0      = 0;
    res.s1      = 0;
    res.strm[0] = 0;
    res.idxs[0].resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) {
        res.idxs[0][i] = plan->slot[from[i]];
    }
    return true;
}

bool kvf_plan_mask(const kvf_pool & pool, ggml_tensor * dst, const llama_ubatch * ubatch) {
    const auto * plan = pool.plan;
    if (!plan) {
        return false;
    }
    const auto & from   = ubatch->data->batch_idxs;
    const size_t value  = ggml_type_size(dst->type);
    const size_t width  = dst->ne[0]*value;
    const size_t stride = plan->mask_stride*value;
    const auto * rows   = (const char *) plan->mask;
    auto *       data   = (char *) dst->data;
    for (size_t i = 0; i < from.size(); ++i) {
        memcpy(data + i*width, rows + from[i]*stride, width);
    }
    return true;
}

void kvf_capture_query(kvf_pool & pool, llm_graph_result & res, ggml_context * ctx, ggml_cgraph * gf,
                       ggml_tensor * q_cur, float kq_scale, int il) {
    if (pool.query_rows == 0) {
        return;
    }
    const auto & layers = kvf_access::layers(pool.kv);
    const auto layer = std::find_if(layers.begin(), layers.end(), [il](const auto & l) { return (int) l.il == il; });
    if (layer == layers.end()) {
        return;  // this layer reads another layer's cache
    }

    const int64_t width = q_cur->ne[0]*q_cur->ne[1];
    const int64_t m     = std::min<int64_t>(pool.query_rows, q_cur->ne[2]);
    if (layer == layers.begin()) {
        pool.query_index = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, m);
        ggml_set_input(pool.query_index);
        res.add_input(std::make_unique<query_index_input>(pool, pool.query_index));
    }

    auto * newest = ggml_view_3d(ctx, q_cur, q_cur->ne[0], q_cur->ne[1], m, q_cur->nb[1], q_cur->nb[2],
                                 (q_cur->ne[2] - m)*q_cur->nb[2]);
    auto * ring   = query_rows(pool, il, width, kq_scale, ggml_backend_buffer_get_type(layer->k->buffer));
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, ring, ggml_cont_2d(ctx, newest, width, m), pool.query_index));
}
