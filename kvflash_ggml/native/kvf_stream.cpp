// A streamed step: the stages are filled in turn while the graph runs.
#include "kvf_stage.h"

#include "kvf_error.h"

#include <algorithm>

namespace {

// Rows of the open chunk, from its block in the pool.
void copy_open(const kvf_lane & lane, const kvf_stages & stages, ggml_tensor * from, ggml_tensor * to) {
    const auto & plan = *stages.plan;
    ggml_context_ptr ctx { ggml_init({ 2*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    const auto part = [&](ggml_tensor * t, int64_t row) {
        auto * res = ggml_view_2d(ctx.get(), t, t->ne[0], plan.open_rows, t->nb[1], row*t->nb[1]);
        ggml_backend_view_init(res);
        return res;
    };
    auto * src = part(from, (int64_t) plan.open_block*KVF_BLOCK);
    auto * dst = part(to, (int64_t) plan.n_streamed*KVF_BLOCK);
    if (lane.copy) {
        ggml_backend_tensor_copy_async(lane.copy.get(), lane.copy.get(), src, dst);
    } else {
        ggml_backend_tensor_copy(src, dst);
    }
}

// The bytes of one layer from the page images to its stage.
void load(kvf_engine & engine, kvf_stages & stages, kvf_stages::ring & ring, size_t place) {
    const size_t layer = ring.layers[place];
    const auto & l     = stages.layers[layer];
    const auto & where = engine.layers[layer];
    const auto & lane  = *ring.lane;
    const size_t page  = engine.info.page_bytes;

    const auto copy = [&](ggml_tensor * t, size_t offset, size_t row) {
        const size_t span = row*KVF_BLOCK;
        for (const auto & r : stages.runs) {
            if (lane.copy) {
                ggml_backend_tensor_set_2d_async(lane.copy.get(), t, r.image + offset, r.row*row, span, r.n, span, page);
            } else {
                ggml_backend_tensor_set_2d(t, r.image + offset, r.row*row, span, r.n, span, page);
            }
            stages.bytes += span*r.n;
        }
    };
    copy(l.k, where.k_offset, where.k_row);
    if (l.v) {
        copy(l.v, where.v_offset, where.v_row);
    }
    if (stages.plan->open_rows > 0) {
        const auto & cached = kvf_access::layers(engine.kv)[layer];
        copy_open(lane, stages, cached.k, l.k);
        if (l.v) {
            copy_open(lane, stages, cached.v, l.v);
        }
    }
    if (lane.copy) {
        ggml_backend_event_record(ring.ready[place % ring.n_stages].get(), lane.copy.get());
    }
}

// The compute submitted from here on reads the layer.
void wait_for(const kvf_stages::ring & ring, size_t place) {
    if (ring.lane->copy) {
        ggml_backend_event_wait(ring.lane->compute, ring.ready[place % ring.n_stages].get());
    }
}

// The layer is loaded when all compute submitted so far is done.
void load_behind(kvf_engine & engine, kvf_stages & stages, kvf_stages::ring & ring, size_t place) {
    kvf_lane_follow(engine, *ring.lane);
    load(engine, stages, ring, place);
}

// All that reads a stage has been submitted: it takes another layer, and the compute goes on with the next one.
void advance(kvf_engine & engine, kvf_stages & stages, kvf_stages::ring & ring, size_t place) {
    if (place + ring.n_stages < ring.layers.size()) {
        load_behind(engine, stages, ring, place + ring.n_stages);
    }
    if (place + 1 < ring.layers.size()) {
        wait_for(ring, place + 1);
    }
}

// The scheduler has submitted all nodes up to this one.
bool on_node(ggml_tensor * node, bool ask, void * data) {
    auto & engine = *(kvf_engine *) data;
    auto & stages = *engine.pool.stages;
    auto * layer  = stages.active ? kvf_attended(stages, node) : nullptr;  // a graph that is reused keeps its observer
    if (ask || !layer) {
        return layer != nullptr;
    }
    if (++layer->read == layer->readers) {
        kvf_masses_submit(engine, *stages.plan, layer - stages.layers.data());
        advance(engine, stages, stages.rings[layer->ring], layer->place);
    }
    return true;
}

// No step but a streamed one is observed: that would split its graph, and keep the device from replaying it. Meanwhile the
// caller's own callback, if there is one, hears nothing.
void observe(kvf_engine & engine, bool on) {
    auto & cparams = kvf_access::cparams(engine.ctx);
    auto & theirs  = engine.pool.stages->callback;
    if (on) {
        theirs = { cparams.cb_eval, cparams.cb_eval_user_data };
    }
    cparams.cb_eval           = on ? on_node : theirs.first;
    cparams.cb_eval_user_data = on ? &engine : theirs.second;
    ggml_backend_sched_set_eval_async(engine.ctx.get_sched(), on);
}

void find_runs(kvf_stages & stages, const kvf_plan & plan, size_t page_bytes) {
    stages.runs.clear();
    for (int32_t i = 0; i < plan.n_streamed; ++i) {
        const auto * image = (const uint8_t *) (uintptr_t) plan.streamed[i];
        if (!stages.runs.empty()) {
            auto & last = stages.runs.back();
            if (image == last.image + last.n*page_bytes) {
                last.n++;
                continue;
            }
        }
        stages.runs.push_back({ image, 1, (int64_t) i*KVF_BLOCK });
    }
}

void write_index(const kvf_stages & stages, const kvf_stages::ring & ring, int32_t n_tokens) {
    auto *       index = stages.layers[ring.layers.front()].index;
    const size_t size  = n_tokens*sizeof(stages.rows[0]);
    kvf_lane_set(*ring.lane, index, stages.rows.data(), 0, size);
}

int64_t rows_before(const kvf_plan & plan) {
    return (int64_t) plan.n_streamed*KVF_BLOCK + plan.open_rows;
}

}  // namespace

kvf_status kvf_stream_check(const kvf_engine & engine, const kvf_plan & plan) {
    const auto * stages = engine.pool.stages.get();
    if (!stages) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d streamed pages in a plan, and no stages were made", plan.n_streamed);
    }
    if (plan.n_tokens > stages->n_tokens) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d tokens in a streamed step, stages were made for %lld", plan.n_tokens,
                        (long long) stages->n_tokens);
    }
    for (int32_t i = 1; i < plan.n_tokens; ++i) {
        if (plan.seq[i] != plan.seq[0]) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "a streamed step has tokens of sequences %d and %d: layer buffers are of one",
                            plan.seq[0], plan.seq[i]);
        }
    }
    const auto n_blocks = engine.info.n_slots/KVF_BLOCK;
    if (plan.open_rows < 0 || plan.open_rows >= KVF_BLOCK || (plan.open_rows > 0 && (plan.open_block < 0 || plan.open_block >= n_blocks))) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d rows of block %d in a streamed step: less than %d, of %d blocks", plan.open_rows,
                        plan.open_block, KVF_BLOCK, n_blocks);
    }
    const auto rows = rows_before(plan) + plan.n_tokens;
    if (plan.n_streamed < 0 || rows > stages->n_slots) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "a streamed step over %lld tokens, stages hold %lld", (long long) rows,
                        (long long) stages->n_slots);
    }
    for (int32_t i = 0; i < plan.n_streamed; ++i) {
        if (plan.streamed[i] == 0) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "streamed chunk %d has no page image", i);
        }
    }
    if (plan.mask_first != 0 && plan.mask_first != plan.n_streamed*KVF_BLOCK) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "a mask from row %d on: 0, or %d", plan.mask_first, plan.n_streamed*KVF_BLOCK);
    }
    const auto width = GGML_PAD(rows, KVF_STAGE_PAD) - plan.mask_first;
    if (plan.mask_stride < width) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "mask rows of %lld values for %lld rows of a stage", (long long) plan.mask_stride,
                        (long long) width);
    }
    return kvf_masses_check(engine, plan);
}

void kvf_stream_begin(kvf_engine & engine, const kvf_plan & plan) {
    auto & stages = *engine.pool.stages;
    stages.active = true;
    stages.plan   = &plan;
    stages.n_kv   = GGML_PAD(rows_before(plan) + plan.n_tokens, KVF_STAGE_PAD);
    stages.first  = plan.mask_first;
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        stages.rows[i] = rows_before(plan) + i;
    }
    for (auto & l : stages.layers) {
        l.read = 0;
    }
    find_runs(stages, plan, engine.info.page_bytes);
    kvf_images_wait(engine, plan.n_streamed, plan.streamed);

    // in its own order after the last step, and after page-outs
    kvf_copies_wait(engine);
    kvf_masses_begin(engine, plan);
    for (auto & ring : stages.rings) {
        write_index(stages, ring, plan.n_tokens);
        for (size_t place = 0; place < std::min(ring.n_stages, ring.layers.size()); ++place) {
            load(engine, stages, ring, place);
        }
        wait_for(ring, 0);
    }
    observe(engine, true);
}

kvf_status kvf_stream_end(kvf_engine & engine, kvf_status status) {
    auto & stages = *engine.pool.stages;
    observe(engine, false);
    stages.active = false;
    stages.plan   = nullptr;
    for (size_t i = 0; i < stages.layers.size() && status == KVF_STATUS_SUCCESS; ++i) {
        if (stages.layers[i].read != stages.layers[i].readers) {
            status = kvf_fail(KVF_STATUS_DECODE, "layer %d was not computed from its stage", engine.layers[i].il);
        }
    }
    stages.ticket = engine.tickets.begin(engine.lanes);
    engine.tickets.end(engine.lanes);
    if (status != KVF_STATUS_SUCCESS) {  // nothing may read the page images any more
        llama_synchronize(&engine.ctx);
        for (const auto & lane : engine.lanes) {
            if (lane.copy) {
                ggml_backend_synchronize(lane.copy.get());
            }
        }
    }
    return status;
}
