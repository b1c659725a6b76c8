// What llama.cpp believes about the slots of the pool, and where a sequence ends.
#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_stage.h"
#include "kvf_state.h"

#include "llama-kv-cache-iswa.h"

#include <algorithm>

namespace {

kvf_status check_slots(const kvf_engine & engine, int32_t slot, int32_t n) {
    if (slot < 0 || n < 0 || n > engine.info.n_slots - slot) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d slots from %d on, there are %d", n, slot, engine.info.n_slots);
    }
    return KVF_STATUS_SUCCESS;
}

// Leave the ends out that the sequence has left: few steps, since cells come and go at the end.
void tighten(kvf_engine & engine, int32_t seq) {
    const auto & cells = kvf_access::cells(engine.kv);
    const auto   has   = [&](int32_t slot) { return !cells.is_empty(slot) && cells.seq_has(slot, seq); };
    auto & held = engine.held[seq];
    while (held.first < held.end && !has(held.end - 1)) {
        held.end--;
    }
    while (held.first < held.end && !has(held.first)) {
        held.first++;
    }
}

}  // namespace

void kvf_hold(kvf_engine & engine, int32_t seq, int32_t slot, int32_t n) {
    auto & held = engine.held[seq];
    held = held.first < held.end ? kvf_span { std::min(held.first, slot), std::max(held.end, slot + n) } : kvf_span { slot, slot + n };
}

kvf_span kvf_view(kvf_engine & engine, const kvf_plan & plan) {
    if (engine.info.n_seq == 1) {
        return {};
    }
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        if (i == 0 || plan.seq[i] != plan.seq[i - 1]) {
            tighten(engine, plan.seq[i]);
        }
    }
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        kvf_hold(engine, plan.seq[i], plan.slot[i], 1);
    }
    if (plan.fixed_view) {
        return { 0, engine.info.n_slots };
    }
    kvf_span view { engine.info.n_slots, 0 };
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        const auto & held = engine.held[plan.seq[i]];
        view = { std::min(view.first, held.first), std::max(view.end, held.end) };
    }
    view.first -= view.first % KVF_STAGE_PAD;
    view.end    = std::min<int32_t>(engine.info.n_slots, GGML_PAD(view.end, KVF_STAGE_PAD));
    return view;
}

kvf_status kvf_cells_clear(kvf_engine * engine, int32_t slot, int32_t n) {
    if (const auto status = check_slots(*engine, slot, n)) {
        return status;
    }
    auto & cells = kvf_access::cells(engine->kv);
    for (int32_t i = slot; i < slot + n; ++i) {
        // `rm` would ask for every sequence that llama.cpp could have
        for (int32_t seq = 0; seq < engine->info.n_seq && !cells.is_empty(i); ++seq) {
            if (cells.seq_has(i, seq)) {
                cells.seq_rm(i, seq);
            }
        }
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_cells_set(kvf_engine * engine, int32_t seq, int32_t slot, int32_t n, const int32_t * pos, const int32_t * token) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    if (n > 0 && *std::min_element(pos, pos + n) < 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "positions from %d on", *std::min_element(pos, pos + n));
    }
    if (const auto status = kvf_cells_clear(engine, slot, n)) {
        return status;
    }
    kvf_hold(*engine, seq, slot, n);
    auto & cells = kvf_access::cells(engine->kv);
    for (int32_t i = 0; i < n; ++i) {
        llama_kv_cell_ext ext;
        ext.tok = token[i];
        if (engine->info.n_pos > 1) {
            // those of a text token; nothing asks for an image's, since masks are planned
            ext.x = pos[i];
            ext.y = pos[i];
        }
        cells.pos_set(slot + i, pos[i]);
        cells.ext_set(slot + i, ext);
        cells.seq_add(slot + i, seq);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_cells_get(const kvf_engine * engine, int32_t slot, int32_t n, int32_t * pos) {
    if (const auto status = check_slots(*engine, slot, n)) {
        return status;
    }
    const auto & cells = kvf_access::cells(engine->kv);
    for (int32_t i = 0; i < n; ++i) {
        pos[i] = cells.is_empty(slot + i) ? -1 : cells.pos_get(slot + i);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_clear(kvf_engine * engine, int32_t seq) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    kvf_synchronize(engine);
    if (engine->info.n_seq > 1) {
        kvf_zero_state(*engine, seq);
        engine->memory.seq_rm(seq, -1, -1);  // the rows of others stay
    } else {
        engine->memory.clear(true);
    }
    engine->held[seq]  = {};
    engine->reach[seq] = 0;
    return KVF_STATUS_SUCCESS;
}

void kvf_zero_unused(kvf_engine * engine) {
    kvf_synchronize(engine);
    kvf_zero_cells(engine->kv);
    kvf_zero_beside(*engine);
    if (engine->pool.stages) {
        kvf_stages_zero(*engine->pool.stages);
    }
}

kvf_status kvf_swa_first(const kvf_engine * engine, int32_t seq, int32_t * pos) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    auto * iswa = kvf_find_iswa(&engine->memory);
    *pos = iswa ? iswa->get_swa()->seq_pos_min(seq) : -1;
    return KVF_STATUS_SUCCESS;
}
