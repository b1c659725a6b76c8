// Queries that a step keeps for scoring: copied by the graph, in the basis of the cached keys, to rows that the plan names.
#include "kvf_engine.h"
#include "kvf_error.h"

#include "llama-graph.h"

#include <algorithm>
#include <stdexcept>
#include <string>

// The tokens of an ubatch whose queries are kept, and where: inputs of a graph, the same for all its layers. A plan names each
// row once, so no ubatch has more of them than there are rows.
class kvf_query_index : public llm_graph_input_i {
public:
    kvf_query_index(const kvf_pool & pool, ggml_context * ctx, int64_t n_tokens)
        : pool(pool), n_tokens(n_tokens), to(input(ctx, GGML_TYPE_I64, std::min<int64_t>(pool.query_rows, n_tokens))),
          from(to->ne[0] < n_tokens ? input(ctx, GGML_TYPE_I32, to->ne[0]) : nullptr) {}

    // The queries [n_values, n_tokens] that go to rows `to`.
    ggml_tensor * select(ggml_context * ctx, ggml_tensor * q) const {
        if (!from) {
            return ggml_cont_2d(ctx, q, q->ne[0]*q->ne[1], n_tokens);
        }
        const bool whole = q->nb[1] == q->ne[0]*q->nb[0];  // the heads of a token lie side by side
        auto *     rows  = whole ? ggml_view_2d(ctx, q, q->ne[0]*q->ne[1], n_tokens, q->nb[2], 0)
                                 : ggml_cont_2d(ctx, q, q->ne[0]*q->ne[1], n_tokens);
        return ggml_get_rows(ctx, rows, from);
    }

    void set_input(const llama_ubatch * ubatch) override {
        const auto & batch = ubatch->data->batch_idxs;
        auto *       row   = (int64_t *) to->data;
        if (!from) {
            for (int64_t i = 0; i < n_tokens; ++i) {
                row[i] = row_of(batch[i]);
            }
            return;
        }
        // the rest of the inputs copies the first token to the row that nobody reads
        auto * token = (int32_t *) from->data;
        std::fill(row, row + to->ne[0], pool.query_rows);
        std::fill(token, token + to->ne[0], 0);
        for (int64_t i = 0, k = 0; i < n_tokens; ++i) {
            if (pool.plan->query_row[batch[i]] >= 0) {
                token[k] = i;
                row[k++] = row_of(batch[i]);
            }
        }
    }

    bool can_reuse(const llm_graph_params & params) override { return params.ubatch.n_tokens == n_tokens; }

    ggml_tensor * rows() const { return to; }

private:
    static ggml_tensor * input(ggml_context * ctx, ggml_type type, int64_t n) {
        auto * res = ggml_new_tensor_1d(ctx, type, n);
        ggml_set_input(res);
        return res;
    }

    int64_t row_of(int32_t token) const {
        const auto row = pool.plan->query_row[token];
        return row >= 0 ? row : pool.query_rows;
    }

    const kvf_pool & pool;
    const int64_t    n_tokens;
    ggml_tensor *    to;    // I64 [m] rows
    ggml_tensor *    from;  // I32 [m] tokens of the ubatch, null: all of them in order
};

namespace {

ggml_backend_buffer_type_t memory_of(const ggml_tensor * tensor) {
    return ggml_backend_buffer_get_type(tensor->buffer);
}

int64_t query_width(const llama_hparams & hparams, int il) {
    return (int64_t) hparams.n_head(il)*hparams.n_embd_head_k(il);
}

// One ring for layers [first, end) of the cache, which are on one device.
kvf_ring make_ring(kvf_pool & pool, size_t first, size_t end) {
    const auto & layers  = kvf_access::layers(pool.kv);
    const auto & hparams = kvf_access::hparams(pool.kv);
    const int64_t n_rows = pool.query_rows + 1;
    int64_t size = 0;
    for (size_t i = first; i < end; ++i) {
        size += query_width(hparams, layers[i].il)*n_rows;
    }
    kvf_ring ring;
    ring.first_layer = first;
    ring.ctx.reset(ggml_init({ (end - first + 1)*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx = ring.ctx.get();
    ring.all = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, size);
    auto * memory = memory_of(layers[first].k);
    ring.buffer.reset(hparams.no_alloc ? ggml_backend_buft_alloc_buffer(memory, 0)
                                       : ggml_backend_alloc_ctx_tensors_from_buft(ctx, memory));
    if (!ring.buffer) {
        throw std::runtime_error("failed to allocate the query rows");
    }
    ggml_backend_buffer_clear(ring.buffer.get(), 0);
    auto * data = (char *) ring.all->data;
    for (size_t i = first; i < end; ++i) {
        auto * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, query_width(hparams, layers[i].il), n_rows);
        if (hparams.no_alloc) {
            rows->buffer = ring.buffer.get();  // a context that is only measured
        } else {
            ggml_backend_tensor_alloc(ring.buffer.get(), rows, data);
            data += ggml_nbytes(rows);
        }
        pool.queries[layers[i].il].rows = rows;
    }
    return ring;
}

// They are made when the first graph is built, that is, while the context reserves its memory.
void make_rings(kvf_pool & pool) {
    const auto & layers = kvf_access::layers(pool.kv);
    for (size_t first = 0, end = 0; first < layers.size(); first = end) {
        while (end < layers.size() && memory_of(layers[end].k) == memory_of(layers[first].k)) {
            ++end;
        }
        pool.rings.push_back(make_ring(pool, first, end));
    }
}

// Those side by side move together, of layers alike with one copy; where most are wanted, one copy takes the others along.
void read_rows(const kvf_engine & engine, const kvf_ring & ring, const kvf_lane & lane, int32_t n, const int32_t * row,
               char * out) {
    if (2*n > engine.info.query_rows) {
        kvf_lane_get(lane, ring.all, out, 0, ggml_nbytes(ring.all));
        return;
    }
    const auto rows_of = [&](size_t i) { return engine.pool.queries.at(engine.layers[i].il).rows; };
    const auto end     = ggml_nbytes(ring.all);
    size_t     offset  = 0;
    for (size_t i = ring.first_layer, alike = 1; offset < end; i += alike, alike = 1) {
        const auto * rows = rows_of(i);
        while (offset + alike*ggml_nbytes(rows) < end && rows_of(i + alike)->ne[0] == rows->ne[0]) {
            ++alike;
        }
        for (int32_t j = 0, count = 1; j < n; j += count, count = 1) {
            while (j + count < n && row[j + count] == row[j] + count) {
                ++count;
            }
            const auto at = offset + row[j]*rows->nb[1];
            kvf_lane_get(lane, ring.all, out + at, at, count*rows->nb[1], alike, ggml_nbytes(rows));
        }
        offset += alike*ggml_nbytes(rows);
    }
}

}  // namespace

kvf_status kvf_check_captured(const kvf_engine & engine) {
    const auto & queries = engine.pool.queries;
    if (queries.empty() || std::any_of(queries.begin(), queries.end(), [](const auto & q) { return q.second.scale == 0.0f; })) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no queries are kept: the pool was made with %d rows for them",
                        engine.info.query_rows);
    }
    return KVF_STATUS_SUCCESS;
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
    if (layer == layers.begin()) {
        if (pool.rings.empty()) {
            make_rings(pool);
        }
        auto index = std::make_unique<kvf_query_index>(pool, ctx, q_cur->ne[2]);
        pool.query_index = index.get();
        res.add_input(std::move(index));
    }
    auto & query = pool.queries.at(il);
    auto * kept  = pool.query_index->select(ctx, q_cur);
    if (kept->ne[0] != query.rows->ne[0]) {
        throw std::runtime_error("layer " + std::to_string(il) + " asks with " + std::to_string(kept->ne[0]) + " values, not "
                                 + std::to_string(query.rows->ne[0]));
    }
    query.scale = kq_scale;
    ggml_build_forward_expand(gf, ggml_set_rows(ctx, query.rows, kept, pool.query_index->rows()));
}

kvf_status kvf_query_read(kvf_engine * engine, int32_t n, const int32_t * row, float * out, uint64_t * ticket) {
    if (const auto status = kvf_check_captured(*engine)) {
        return status;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (row[i] < 0 || row[i] > engine->info.query_rows) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "row %d of queries, there are %d", row[i], engine->info.query_rows + 1);
        }
    }
    *ticket = engine->tickets.begin(engine->lanes);
    for (const auto & ring : engine->pool.rings) {
        const auto & lane = engine->lanes[engine->layers[ring.first_layer].device];
        kvf_lane_follow(*engine, lane);
        read_rows(*engine, ring, lane, n, row, (char *) out);
        out += ggml_nelements(ring.all);
    }
    engine->tickets.end(engine->lanes);
    engine->compute_barrier = *ticket;
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_query_write(kvf_engine * engine, const float * rows) {
    if (const auto status = kvf_check_captured(*engine)) {
        return status;
    }
    kvf_synchronize(engine);
    for (const auto & ring : engine->pool.rings) {
        ggml_backend_tensor_set(ring.all, rows, 0, ggml_nbytes(ring.all));
        rows += ggml_nelements(ring.all);
    }
    return KVF_STATUS_SUCCESS;
}
