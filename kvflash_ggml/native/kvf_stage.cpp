// Stages are made, and how the graph of a streamed step differs: the functions that the patched sources call.
#include "kvf_stage.h"

#include "kvf_error.h"
#include "kvf_hooks.h"

#include "llama.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

const char STAGE_NAME[] = "kvf_stage_";  // and its layer

// A tensor like one of the cache, with other rows.
ggml_tensor * like(ggml_context * ctx, const ggml_tensor * t, int64_t n_rows) {
    return t ? ggml_new_tensor_2d(ctx, t->type, t->ne[0], n_rows) : nullptr;
}

bool same_shape(const ggml_tensor * a, const ggml_tensor * b) {
    return (a == nullptr) == (b == nullptr) && (!a || (a->ne[0] == b->ne[0] && a->type == b->type));
}

// Gives the pages of a buffer in the process's own memory back: they are zero when they are used again. False for any
// other buffer. Stages of 4M tokens take 2 GiB, and zeroing that takes a second.
bool give_back(ggml_backend_buffer * buffer) {
#ifdef __linux__
    if (ggml_backend_buffer_get_type(buffer) == ggml_backend_cpu_buffer_type()) {
        const size_t page  = sysconf(_SC_PAGESIZE);
        auto * const begin = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer));
        auto * const end   = begin + ggml_backend_buffer_get_size(buffer);
        const size_t head  = GGML_PAD(reinterpret_cast<uintptr_t>(begin), page) - reinterpret_cast<uintptr_t>(begin);
        const size_t tail  = reinterpret_cast<uintptr_t>(end) % page;
        const size_t size  = end - begin;
        if (size > head + tail && madvise(begin + head, size - head - tail, MADV_DONTNEED) == 0) {
            memset(begin, 0, head);
            memset(end - tail, 0, tail);
            return true;
        }
    }
#endif
    return false;
}

// The first layer of a ring owns its memory: one stage, or two.
void make_memory(kvf_stages & stages, kvf_stages::ring & ring, const ggml_tensor * k, const ggml_tensor * v) {
    const size_t n_tensors = 2*ring.n_stages + 1 + 2*ring.layers.size();
    ring.ctx.reset(ggml_init({ n_tensors*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx   = ring.ctx.get();
    auto * index = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, stages.n_tokens);
    std::array<ggml_tensor *, 2> stage_k {}, stage_v {};
    for (size_t i = 0; i < ring.n_stages; ++i) {
        stage_k[i] = like(ctx, k, stages.n_slots);
        stage_v[i] = like(ctx, v, stages.n_slots);
    }
    ring.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, ggml_backend_buffer_get_type(k->buffer)));
    if (!ring.buffer) {
        throw std::bad_alloc();
    }
    stages.device_bytes += ggml_backend_buffer_get_size(ring.buffer.get());

    const auto alias = [&](ggml_tensor * stage) {
        auto * res = like(ctx, stage, stages.n_slots);
        if (res) {
            ggml_backend_tensor_alloc(ring.buffer.get(), res, stage->data);
        }
        return res;
    };
    for (size_t i = 0; i < ring.layers.size(); ++i) {
        auto & l = stages.layers[ring.layers[i]];
        l.k     = alias(stage_k[i % ring.n_stages]);
        l.v     = alias(stage_v[i % ring.n_stages]);
        ggml_format_name(l.k, "%s%zu", STAGE_NAME, ring.layers[i]);
        l.index = index;
    }
}

// The graph of the largest streamed step, with memory to compute it.
ggml_cgraph * reserve(kvf_engine & engine, kvf_stages & stages) {
    stages.active = true;
    stages.n_kv   = stages.n_slots;
    stages.first  = std::max<int64_t>(0, stages.n_slots - GGML_PAD(stages.n_tokens + KVF_BLOCK, KVF_STAGE_PAD) - KVF_STAGE_PAD);
    const auto n_outputs = std::min<uint32_t>(stages.n_tokens, engine.ctx.get_cparams().n_outputs_max);
    auto *     graph     = llama_graph_reserve(&engine.ctx, stages.n_tokens, 1, n_outputs);
    stages.active   = false;
    stages.reserved = graph != nullptr;
    return graph;
}

// Can every layer be attended through its stage?
kvf_status check_graph(kvf_engine & engine, kvf_stages & stages) {
    auto * graph = reserve(engine, stages);
    if (!graph) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory to compute steps of %lld tokens over %lld",
                        (long long) stages.n_tokens, (long long) stages.n_slots);
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (auto * l = kvf_attended(stages, ggml_graph_node(graph, i))) {
            l->read++;
        }
    }
    for (size_t i = 0; i < stages.layers.size(); ++i) {
        const auto & l = stages.layers[i];
        if (l.readers == 0 || l.read != l.readers) {
            return kvf_fail(KVF_STATUS_UNSUPPORTED, "layer %d does not attend by flash attention to its cache alone",
                            engine.layers[i].il);
        }
    }
    return KVF_STATUS_SUCCESS;
}

}  // namespace

kvf_stages::layer * kvf_attended(kvf_stages & stages, const ggml_tensor * node) {
    if (node->op != GGML_OP_FLASH_ATTN_EXT) {
        return nullptr;
    }
    const auto * k = node->src[1];
    while (k->view_src || k->op == GGML_OP_CPY) {  // F32 keys are cast
        k = k->view_src && k->op != GGML_OP_CPY ? k->view_src : k->src[0];
    }
    const auto l = std::find_if(stages.layers.begin(), stages.layers.end(), [k](const auto & l) { return l.k == k; });
    if (l != stages.layers.end()) {
        return &*l;
    }
    // attention that is computed on another device reads a copy that the scheduler has made when the stage was filled
    const char * name = strstr(k->name, STAGE_NAME);
    return name ? &stages.layers.at(atoi(name + strlen(STAGE_NAME))) : nullptr;
}

kvf_stages::kvf_stages(const kvf_engine & engine, int64_t n_slots, int64_t n_tokens)
    : n_slots(n_slots), n_tokens(n_tokens), layers(engine.layers.size()), rows(n_tokens) {
    const auto & cached = kvf_access::layers(engine.kv);
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto * lane = &engine.lanes[engine.layers[i].device];
        auto         same = std::find_if(rings.begin(), rings.end(), [&](const auto & r) {
            const auto & first = cached[r.layers.front()];
            return r.lane == lane && same_shape(first.k, cached[i].k) && same_shape(first.v, cached[i].v);
        });
        if (same == rings.end()) {
            rings.emplace_back();
            same = rings.end() - 1;
            same->lane     = lane;
            same->n_stages = lane->copy ? 2 : 1;
        }
        layers[i].ring  = same - rings.begin();
        layers[i].place = same->layers.size();
        same->layers.push_back(i);
    }
    for (auto & ring : rings) {
        const auto & first = cached[ring.layers.front()];
        make_memory(*this, ring, first.k, first.v);
        for (size_t i = 0; ring.lane->copy && i < ring.n_stages; ++i) {
            ring.ready[i].reset(ggml_backend_event_new(ring.lane->dev));
        }
    }
    kvf_stages_zero(*this);
}

void kvf_stages_zero(const kvf_stages & stages) {
    for (const auto & ring : stages.rings) {
        if (!give_back(ring.buffer.get())) {
            ggml_backend_buffer_clear(ring.buffer.get(), 0);
        }
    }
}

kvf_status kvf_stage_init(kvf_engine * engine, int32_t n_slots, int32_t n_tokens, int64_t * device_bytes) {
    if (n_slots <= 0 || n_slots % KVF_STAGE_PAD != 0 || n_tokens <= 0 || n_tokens > n_slots) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "stages of %d slots for steps of %d tokens: the slots are a multiple of %d, "
                        "and at least as many as the tokens", n_slots, n_tokens, (int) KVF_STAGE_PAD);
    }
    if (engine->info.mask_f32 || engine->info.v_trans) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "stages need flash attention");
    }
    try {
        kvf_synchronize(engine);
        engine->pool.stages.reset();
        engine->pool.stages = std::make_shared<kvf_stages>(*engine, n_slots, n_tokens);
        const auto status = check_graph(*engine, *engine->pool.stages);
        *device_bytes = engine->pool.stages->device_bytes;
        if (status) {
            engine->pool.stages.reset();
        }
        return status;
    } catch (const std::exception & err) {
        engine->pool.stages.reset();
        return kvf_fail(KVF_STATUS_MEMORY, "no memory for stages of %d slots: %s", n_slots, err.what());
    }
}

kvf_status kvf_stages_reserve(kvf_engine & engine) {
    return reserve(engine, *engine.pool.stages) ? KVF_STATUS_SUCCESS
                                                : kvf_fail(KVF_STATUS_MEMORY, "no memory to compute a streamed step");
}

uint64_t kvf_streamed_ticket(const kvf_engine * engine) {
    return engine->pool.stages ? engine->pool.stages->ticket : 0;
}

uint64_t kvf_streamed_bytes(const kvf_engine * engine) {
    return engine->pool.stages ? engine->pool.stages->bytes : 0;
}

// A context says so when it is closed and its compute buffers are not as large as planned.
void kvf_access::expect_buffers(llama_context & ctx) {
    for (size_t i = 0; i < ctx.backend_ptrs.size(); ++i) {
        ctx.backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(ctx.get_sched(), ctx.backend_ptrs[i]);
    }
}

// --- hooks

namespace {

kvf_stages * active(const kvf_pool * pool) {
    return pool && pool->stages && pool->stages->active ? pool->stages.get() : nullptr;
}

// Keys or values from the first slot on that the step attends to. With several sequences V is not transposed.
ggml_tensor * from_view(const kvf_pool * pool, ggml_context * ctx, ggml_tensor * t) {
    if (!pool || pool->view.first == 0) {
        return t;
    }
    const int64_t first = pool->view.first;
    return ggml_view_2d(ctx, t, t->ne[0], t->ne[1] - first, t->nb[1], first*t->nb[1]);
}

}  // namespace

uint32_t kvf_stage_n_kv(const kvf_pool * pool, uint32_t n_kv) {
    const auto * stages = active(pool);
    if (stages) {
        return stages->n_kv;
    }
    return pool && pool->view.end > 0 ? pool->view.end - pool->view.first : n_kv;
}

ggml_tensor * kvf_stage_k(const kvf_pool * pool, ggml_context * ctx, size_t layer, ggml_tensor * k) {
    auto * stages = active(pool);
    if (!stages) {
        return from_view(pool, ctx, k);
    }
    stages->layers[layer].readers++;
    return stages->layers[layer].k;
}

ggml_tensor * kvf_stage_v(const kvf_pool * pool, ggml_context * ctx, size_t layer, ggml_tensor * v) {
    const auto * stages = active(pool);
    return stages ? stages->layers[layer].v : from_view(pool, ctx, v);
}

ggml_tensor * kvf_stage_rows(const kvf_pool * pool, ggml_context * ctx, size_t layer, bool keys, ggml_tensor * pooled) {
    const auto * stages = active(pool);
    if (!stages) {
        return pooled;
    }
    const auto & l    = stages->layers[layer];
    auto *       rows = pooled->src[0];
    auto *       res  = ggml_set_rows(ctx, keys ? l.k : l.v, rows, ggml_view_1d(ctx, l.index, rows->ne[1], 0));
    res->src[GGML_MAX_SRC - 1] = pooled;  // both belong to the graph
    return res;
}

// Every row sees what comes before the plan's columns. So that is not made on the host, row by row, but filled in on the
// device, in pairs of halves; a streamed step over 131,072 tokens would upload half a gigabyte else.
ggml_tensor * kvf_stage_mask(const kvf_pool * pool, ggml_context * ctx, int64_t n_tokens) {
    if (pool && pool->stages) {
        pool->stages->mask = nullptr;  // of a graph that is gone: its address may be given again
    }
    auto * stages = active(pool);
    if (!stages) {
        return nullptr;
    }
    for (auto & l : stages->layers) {
        l.readers = 0;  // a graph begins
    }
    auto * tail = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, (stages->n_kv - stages->first)/2, n_tokens);
    ggml_set_input(tail);
    ggml_set_name(tail, "kvf_mask_tail");
    auto * open = ggml_fill_inplace(ctx, ggml_new_tensor_2d(ctx, GGML_TYPE_F32, stages->n_kv/2, n_tokens), 0.0f);
    auto * both = ggml_set_2d_inplace(ctx, open, tail, open->nb[1], stages->first*sizeof(ggml_fp16_t));
    auto * mask = ggml_view_tensor(ctx, both);
    mask->op     = GGML_OP_VIEW;
    mask->src[0] = both;
    mask->type   = GGML_TYPE_F16;
    mask->ne[0]  = stages->n_kv;
    mask->nb[0]  = sizeof(ggml_fp16_t);
    stages->mask      = mask;
    stages->mask_tail = tail;
    return mask;
}

bool kvf_stage_mask_fits(const kvf_pool * pool, const ggml_tensor * mask) {
    const auto * stages = active(pool);
    if (!stages) {
        return mask->op == GGML_OP_NONE && mask->op_params[0] == (pool ? pool->view.first : 0);
    }
    return mask == stages->mask && stages->mask_tail->ne[0] == (stages->n_kv - stages->first)/2;
}
