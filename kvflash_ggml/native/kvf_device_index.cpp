#include "kvf_device_index.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_index.h"

#include <algorithm>

namespace {

constexpr int64_t AT_ONCE = 1 << 20;  // results of one launch, in 4 MiB: 32 heads of 2M tokens

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

void set(const kvf_device_index & there, ggml_tensor * tensor, const void * data, int64_t offset, int64_t size) {
    ggml_backend_tensor_set_async(there.queue.get(), tensor, data, offset, size);
}

bool is_inside(const kvf_device_index & there, int64_t offset, int64_t n, int64_t size) {
    const int64_t all = ggml_nbytes(there.rows);
    return offset >= 0 && n > 0 && size > 0 && size <= all && n <= (all - offset)/size;
}

}  // namespace

kvf_status kvf_index_open(kvf_engine * engine, int64_t size, int64_t * device_bytes) {
    int64_t columns = 0, units = 0, blocks = 1;
    for (const auto & l : engine->layers) {
        columns += (int64_t) l.n_head*engine->info.query_rows;
        units   += l.n_head_kv;
        blocks   = std::max(blocks, blocks_of(l));
    }
    auto made = std::make_unique<kvf_device_index>();
    const auto * lane = find_lane(*engine, made->scores);
    if (!lane || blocks > KVF_SCORES_MAX_BLOCKS || columns == 0) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "no device of the pool scores by an index");
    }
    made->ctx.reset(ggml_init({ 4*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx = made->ctx.get();
    made->rows    = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, size);
    made->units   = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, units*sizeof(kvf_scores_unit));
    made->queries = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, columns*blocks*ggml_type_size(GGML_TYPE_Q8_0));
    made->out     = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, std::max(columns, AT_ONCE));
    made->queue.reset(ggml_backend_dev_init(lane->dev, nullptr));
    made->buffer.reset(made->queue ? ggml_backend_alloc_ctx_tensors(ctx, made->queue.get()) : nullptr);
    if (!made->buffer) {
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
        set(*there, there->rows, (const void *) (uintptr_t) row[i], offset + i*size, size);
    }
    ggml_backend_synchronize(there->queue.get());  // the rows are their owner's again
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_score_there(kvf_engine * engine, int32_t n_units, const kvf_head * units, int32_t n_heads,
                                 const kvf_head * heads, int32_t n, int64_t offset, int32_t rows, const float * queries,
                                 float * out) {
    const auto layers = kvf_layers(*engine);
    if (const auto status = kvf_check_score(layers, n_heads, heads, n, rows)) {
        return status;
    }
    if (const auto status = kvf_check_heads(layers, n_units, units, &kvf_layer::n_head_kv)) {
        return status;
    }
    const auto    keys   = kvf_rows_of_index(layers, n_units, units);
    const int64_t size   = keys.back().offset + KVF_BLOCK*keys.back().stride;
    const auto    groups = kvf_group_columns(layers, keys, n_heads, heads, rows, queries);
    auto *        there  = engine->device_index.get();
    if (groups.empty()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the index lacks the KV head of a query head");
    }
    if (!there || !is_inside(*there, offset, n, size) || rows > engine->info.query_rows) {
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
    there->unit.clear();
    there->asked.assign(columns*query_size, 0);
    for (const auto & g : groups) {
        const auto & k = *g.keys;
        const int64_t one = g.queries.size()/g.count;
        there->unit.push_back({ (int32_t) k.offset, (int32_t) (k.width/ggml_blck_size(k.type)), (int32_t) g.first,
                                (int32_t) g.count, k.scale });
        for (int64_t j = 0; j < g.count; ++j) {
            std::copy_n(g.queries.data() + j*one, one, there->asked.data() + (g.first + j)*query_size);
        }
    }
    set(*there, there->units, there->unit.data(), 0, there->unit.size()*sizeof(kvf_scores_unit));
    set(*there, there->queries, there->asked.data(), 0, there->asked.size());
    for (int64_t c = 0; c < n; c += at_once) {
        const auto   count = std::min(at_once, n - c);
        const auto * from  = (const uint8_t *) there->rows->data + offset + c*size;
        there->scores(there->queue.get(), from, size, count, (const kvf_scores_unit *) there->units->data, groups.size(), most,
                      there->queries->data, query_size, (float *) there->out->data);
        ggml_backend_tensor_get_2d_async(there->queue.get(), there->out, out + c, 0, count*sizeof(float), columns,
                                         count*sizeof(float), n*sizeof(float));
    }
    ggml_backend_synchronize(there->queue.get());
    return KVF_STATUS_SUCCESS;
}
