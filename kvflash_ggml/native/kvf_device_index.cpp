#include "kvf_device_index.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_index.h"

#include <algorithm>

namespace {

constexpr int64_t AT_ONCE = 1 << 20;  // results of one launch, in 4 MiB: 32 heads of 2M tokens
constexpr int64_t ALIGNED = 256;

// The first device that computes beside the host, and whose backend has the kernel.
const kvf_lane * find_lane(const kvf_engine & engine, decltype(&kvf_scores) & scores) {
    for (const auto & lane : engine.lanes) {
        if (lane.mode == KVF_MODE_STREAM) {
            scores = (decltype(&kvf_scores)) ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(lane.dev), KVF_SCORES);
            if (scores) {
                return &lane;
            }
        }
    }
    return nullptr;
}

int64_t blocks_of(const kvf_layer & l) {
    return GGML_PAD(l.head_k, ggml_blck_size(KVF_INDEX_TYPE))/ggml_blck_size(KVF_INDEX_TYPE);
}

// Where in the host's memory results begin.
int64_t of_host(const kvf_device_index & there) {
    return GGML_PAD(ggml_nbytes(there.asked), ALIGNED);
}

// Rows of queries that a text has at most.
int32_t most_rows(const kvf_engine & engine) {
    return engine.info.query_rows/engine.info.n_seq;
}

bool is_inside(const kvf_device_index & there, int64_t offset, int64_t n, int64_t size) {
    const int64_t all = ggml_nbytes(there.rows);
    return offset >= 0 && n > 0 && size > 0 && size <= all && n <= (all - offset)/size;
}

}  // namespace

kvf_status kvf_index_open(kvf_engine * engine, int64_t size, int64_t * device_bytes) {
    int64_t columns = 0, units = 0, blocks = 1;
    for (const auto & l : engine->layers) {
        columns += (int64_t) l.n_head*most_rows(*engine);
        units   += l.n_head_kv;
        blocks   = std::max(blocks, blocks_of(l));
    }
    auto made = std::make_unique<kvf_device_index>();
    const auto * lane = find_lane(*engine, made->scores);
    if (!lane || blocks > KVF_SCORES_MAX_BLOCKS || columns == 0) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "no device of the pool scores by an index");
    }
    made->ctx.reset(ggml_init({ 3*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx = made->ctx.get();
    made->queries = GGML_PAD(units*sizeof(kvf_scores_unit), ALIGNED);
    made->rows    = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, size);
    made->asked   = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, made->queries + columns*blocks*ggml_type_size(GGML_TYPE_Q8_0));
    made->out     = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, std::max(columns, AT_ONCE));
    made->queue.reset(ggml_backend_dev_init(lane->dev, nullptr));
    made->buffer.reset(made->queue ? ggml_backend_alloc_ctx_tensors(ctx, made->queue.get()) : nullptr);
    made->host.reset(ggml_backend_buft_alloc_buffer(engine->host_buft, of_host(*made) + ggml_nbytes(made->out)));
    if (!made->buffer || !made->host) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory for an index of %lld bytes on %s", (long long) size,
                        ggml_backend_dev_name(lane->dev));
    }
    engine->device_index = std::move(made);
    *device_bytes = ggml_backend_buffer_get_size(engine->device_index->buffer.get());
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_put(kvf_engine * engine, int64_t offset, int32_t n, const uint64_t * row, int64_t size) {
    auto * there = engine->device_index.get();
    if (!there || !is_inside(*there, offset, n, size)) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no room for %d index rows of %lld bytes at %lld", n, (long long) size,
                        (long long) offset);
    }
    const std::lock_guard<std::mutex> lock(there->mutex);
    for (int32_t i = 0; i < n; ++i) {
        ggml_backend_tensor_set_async(there->queue.get(), there->rows, (const void *) (uintptr_t) row[i], offset + i*size, size);
    }
    ggml_backend_synchronize(there->queue.get());  // the rows are their owner's again
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_score_there(kvf_engine * engine, int32_t n_units, const kvf_head * units, int32_t n_heads,
                                 const kvf_head * heads, int32_t n, int64_t offset, int32_t rows, const float * queries,
                                 float * out) {
    const auto layers = kvf_layers(*engine);
    if (const auto status = kvf_check_index(layers, n_units, units, n_heads, heads, n, rows)) {
        return status;
    }
    const auto    keys   = kvf_rows_of_index(layers, n_units, units);
    const int64_t size   = keys.back().offset + KVF_BLOCK*keys.back().stride;
    const auto    groups = kvf_group_columns(layers, keys, n_heads, heads, rows, queries);
    auto *        there  = engine->device_index.get();
    if (groups.empty()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the index lacks the KV head of a query head");
    }
    if (!there || !is_inside(*there, offset, n, size) || rows > most_rows(*engine)) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no index of %d rows of %lld bytes at %lld for %d queries a head", n,
                        (long long) size, (long long) offset, rows);
    }
    int64_t query_size = 0, most = 0;
    for (const auto & g : groups) {
        query_size = std::max<int64_t>(query_size, g.queries.size()/g.count);
        most       = std::max(most, g.count);
    }
    const int64_t columns = (int64_t) n_heads*rows;
    const auto    at_once = std::clamp<int64_t>(there->out->ne[0]/columns, 1, n);

    const std::lock_guard<std::mutex> lock(there->mutex);
    auto * const host    = (uint8_t *) ggml_backend_buffer_get_base(there->host.get());
    auto * const results = (float *) (host + of_host(*there));
    auto *       unit    = (kvf_scores_unit *) host;
    for (const auto & g : groups) {
        const auto &  k   = *g.keys;
        const int64_t one = g.queries.size()/g.count;
        *unit++ = { (int32_t) k.offset, (int32_t) (k.width/ggml_blck_size(k.type)), (int32_t) g.first, (int32_t) g.count, k.scale };
        for (int64_t j = 0; j < g.count; ++j) {
            std::copy_n(g.queries.data() + j*one, one, host + there->queries + (g.first + j)*query_size);
        }
    }
    auto *       queue = there->queue.get();
    const auto * asked = (const uint8_t *) there->asked->data;
    ggml_backend_tensor_set_async(queue, there->asked, host, 0, there->queries + columns*query_size);
    for (int64_t c = 0; c < n; c += at_once) {
        const auto   count = std::min(at_once, n - c);
        const auto * from  = (const uint8_t *) there->rows->data + offset + c*size;
        there->scores(queue, from, size, count, (const kvf_scores_unit *) asked, groups.size(), most, asked + there->queries,
                      query_size, (float *) there->out->data);
        ggml_backend_tensor_get_async(queue, there->out, results, 0, columns*count*sizeof(float));
        ggml_backend_synchronize(queue);
        for (int64_t i = 0; i < columns; ++i) {
            std::copy_n(results + i*count, count, out + i*n + c);
        }
    }
    return KVF_STATUS_SUCCESS;
}
