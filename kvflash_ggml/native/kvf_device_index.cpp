#include "kvf_device_index.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_index.h"

#include <algorithm>

static_assert(KVF_INDEX_ROWS == KVF_SCORES_MAX_ROWS, "what a caller may ask for is what a kernel takes");

namespace {

int64_t blocks_of(const kvf_layer & l) {
    return GGML_PAD(l.head_k, ggml_blck_size(KVF_INDEX_TYPE))/ggml_blck_size(KVF_INDEX_TYPE);
}

bool is_inside(const kvf_device_index & there, int64_t offset, int64_t n, int64_t size) {
    const int64_t all = ggml_nbytes(there.rows);
    const bool    fit = offset >= 0 && offset % 16 == 0;  // a kernel reads 16 bytes at once
    return fit && n > 0 && size > 0 && size <= all && n <= (all - offset)/size;
}

// Rows of queries that a text has, or is asked for, at most.
int32_t most_rows(const kvf_engine & engine) {
    return std::min(KVF_SCORES_MAX_ROWS, engine.info.query_rows/engine.info.n_seq);
}

// Are these rows of captured queries?
bool are_rows(const kvf_engine & engine, int32_t n, const int32_t * row) {
    return n <= most_rows(engine) && std::all_of(row, row + n, [&](auto i) { return i >= 0 && i < engine.info.query_rows; });
}

}  // namespace

kvf_status kvf_index_open(kvf_engine * engine, int64_t size, int64_t * device_bytes) {
    const auto & lane   = engine->lanes.front();
    auto *       reg    = ggml_backend_dev_backend_reg(lane.dev);
    const auto   scores = (decltype(&kvf_scores)) ggml_backend_reg_get_proc_address(reg, KVF_SCORES);
    int64_t heads = 0, units = 0, blocks = 1;
    for (const auto & l : engine->layers) {
        heads += l.n_head;
        units += l.n_head_kv;
        blocks = std::max(blocks, blocks_of(l));
    }
    if (!scores || engine->lanes.size() > 1 || lane.mode != KVF_MODE_STREAM || blocks > KVF_SCORES_MAX_BLOCKS
        || most_rows(*engine) == 0) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "no device holds all of the pool and scores by an index");
    }
    if (size <= 0 || engine->device_index) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "an index of %lld bytes, %s", (long long) size,
                        engine->device_index ? "and there is one" : "there must be some");
    }
    auto made = std::make_unique<kvf_device_index>();
    made->lane   = &lane;
    made->scores = scores;
    made->blocks = blocks;
    made->heads_at  = GGML_PAD(units*sizeof(kvf_scores_unit), alignof(kvf_scores_head));
    made->ctx.reset(ggml_init({ 4*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto *     ctx     = made->ctx.get();
    const auto columns = heads*most_rows(*engine);
    made->rows    = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, size);
    made->asked   = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, made->heads_at + heads*sizeof(kvf_scores_head));
    made->queries = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, columns*blocks*ggml_type_size(GGML_TYPE_Q8_0));
    made->out     = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, KVF_INDEX_SCORES);
    made->buffer.reset(ggml_backend_alloc_ctx_tensors(ctx, lane.compute));
    if (!made->buffer) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory for an index of %lld bytes on %s", (long long) size,
                        ggml_backend_dev_name(lane.dev));
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
    for (int32_t i = 0; i < n; ++i) {
        ggml_backend_tensor_set(there->rows, (const void *) (uintptr_t) row[i], offset + i*size, size);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_index_score_there(kvf_engine * engine, int32_t n_units, const kvf_head * units, int32_t n_heads,
                                 const kvf_head * heads, int32_t n, int64_t offset, int32_t rows, const int32_t * row,
                                 float * out) {
    const auto layers = kvf_layers(*engine);
    if (const auto status = kvf_check_index(layers, n_units, units, n_heads, heads, n, rows)) {
        return status;
    }
    if (const auto status = kvf_check_captured(*engine)) {
        return status;
    }
    const auto    keys    = kvf_rows_of_index(layers, n_units, units);
    const int64_t size    = keys.back().offset + KVF_BLOCK*keys.back().stride;
    const auto    groups  = kvf_group_columns(layers, keys, n_heads, heads, rows);
    const int64_t columns = (int64_t) n_heads*rows;
    auto *        there   = engine->device_index.get();
    if (groups.empty()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the index lacks the KV head of a query head");
    }
    if (!there || !is_inside(*there, offset, n, size) || !are_rows(*engine, rows, row) || columns*n > KVF_INDEX_SCORES) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no index of %d rows of %lld bytes at %lld for %d queries a head", n,
                        (long long) size, (long long) offset, rows);
    }
    std::vector<char> asked(there->heads_at + n_heads*sizeof(kvf_scores_head));
    auto *  part = (kvf_scores_unit *) asked.data();
    int64_t most = 0;
    for (const auto & g : groups) {
        const auto & k      = *g.keys;
        const auto   blocks = k.width/ggml_blck_size(k.type);
        *part++ = { (int32_t) k.offset, (int32_t) blocks, (int32_t) g.first, (int32_t) g.count, k.scale };
        most    = std::max(most, g.count);
    }
    auto * head = (kvf_scores_head *) (asked.data() + there->heads_at);
    for (int32_t i = 0; i < n_heads; ++i) {
        const auto & l      = layers[heads[i].layer];
        const auto * stored = engine->pool.queries.at(l.il).rows;
        *head++ = { (const float *) stored->data + heads[i].head*l.head_k, stored->ne[0], l.head_k };
    }
    auto * compute = there->lane->compute;
    if (asked != there->known) {
        ggml_backend_tensor_set_async(compute, there->asked, asked.data(), 0, asked.size());
        ggml_backend_synchronize(compute);
        there->known = std::move(asked);
    }
    kvf_scores_rows wanted = { rows, {} };
    std::copy_n(row, rows, wanted.row);
    const auto * there_asked = (const char *) there->asked->data;
    there->scores(compute, (const char *) there->rows->data + offset, size, n, (const kvf_scores_unit *) there_asked,
                  groups.size(), most, (const kvf_scores_head *) (there_asked + there->heads_at), n_heads, wanted,
                  there->queries->data, there->blocks, (float *) there->out->data);
    ggml_backend_tensor_get_async(compute, there->out, out, 0, columns*n*sizeof(float));
    return KVF_STATUS_SUCCESS;
}
