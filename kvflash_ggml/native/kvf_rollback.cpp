// Rollback planes: the recurrent states after the last tokens of a step, beside the current one.
//
// llama.cpp goes back to any plane, whatever it holds: a step of n tokens writes n of them, the others are of earlier steps;
// after a failed step, or with another state in place, all of them are. So it is asked only where the plane is known.
#include "kvf_rollback.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_state.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-recurrent.h"

#include <algorithm>

namespace {

bool can_truncate(const kvf_engine & engine, int32_t seq, int32_t pos) {
    const auto * recurrent = kvf_find_recurrent(&engine.memory);
    return !recurrent || pos <= 0 || recurrent->seq_pos_max(seq) + 1 - pos <= engine.reach[seq];
}

// Steps of others may have taken cells of a window that drafts had moved on.
bool has_window(const kvf_engine & engine, int32_t seq, int32_t pos) {
    auto * iswa = engine.info.n_seq > 1 ? kvf_find_iswa(&engine.memory) : nullptr;
    return !iswa || pos <= 0 || iswa->get_swa()->seq_pos_min(seq) <= std::max(0, pos + 1 - engine.info.n_swa);
}

// The cell of the state of each sequence.
std::vector<int32_t> places(const kvf_engine & engine) {
    std::vector<int32_t> res(engine.info.n_seq, -1);
    if (const auto * recurrent = kvf_find_recurrent(&engine.memory)) {
        for (int32_t seq = 0; seq < engine.info.n_seq; ++seq) {
            res[seq] = recurrent->cells[seq].tail;
        }
    }
    return res;
}

}  // namespace

std::string kvf_planes_refusal(llama_context & ctx) {
    const auto * recurrent = kvf_find_recurrent(ctx.get_memory());
    const auto   n_ubatch  = ctx.get_cparams().n_ubatch;
    if (!recurrent || recurrent->n_rs_seq == 0 || n_ubatch > recurrent->n_rs_seq + 1) {
        return "";
    }
    // llama.cpp aborts at the first step
    return "n_rs_seq is " + std::to_string(recurrent->n_rs_seq) + ", which needs an n_ubatch of "
         + std::to_string(recurrent->n_rs_seq + 2) + " or more, not " + std::to_string(n_ubatch);
}

int64_t kvf_recurrent_bytes(const llama_memory_recurrent & memory) {
    int64_t res = 0;
    for (const auto * tensors : { &memory.r_l, &memory.s_l, &memory.p_l }) {
        for (const auto * tensor : *tensors) {
            res += tensor ? ggml_nbytes(tensor) : 0;
        }
    }
    return res/(memory.n_rs_seq + 1);
}

kvf_reach::kvf_reach(kvf_engine & engine, const kvf_plan & plan)
    : engine(engine), before(engine.reach), tokens(engine.info.n_seq), places(::places(engine)),
      shared(plan.embd && engine.info.n_pos > 1) {
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        tokens[plan.seq[i]]++;
        engine.reach[plan.seq[i]] = -1;
    }
}

void kvf_reach::kept() {
    engine.reach = before;
}

void kvf_reach::computed() {
    const auto now = ::places(engine);
    for (int32_t seq = 0; seq < engine.info.n_seq; ++seq) {
        if (tokens[seq] > 0) {  // in one ubatch, or in several of which the last one counts
            engine.reach[seq] = shared ? 0 : std::min({ engine.info.rs_planes, engine.pool.ubatch_tokens - 1, tokens[seq] - 1 });
        } else if (now[seq] != places[seq]) {
            engine.reach[seq] = 0;  // the planes stay where they were
        }
    }
}

void kvf_reach::failed() {
    const auto now = ::places(engine);
    for (int32_t seq = 0; seq < engine.info.n_seq; ++seq) {
        if (tokens[seq] == 0 && now[seq] != places[seq]) {  // it may not have been moved
            kvf_find_recurrent(&engine.memory)->seq_rm(seq, -1, -1);
            engine.reach[seq] = -1;
        }
    }
}

kvf_status kvf_can_truncate(const kvf_engine * engine, int32_t seq, int32_t pos, int32_t * can) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    *can = can_truncate(*engine, seq, pos) && has_window(*engine, seq, pos);
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_truncate(kvf_engine * engine, int32_t seq, int32_t pos, int32_t * done) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    const auto * recurrent = kvf_find_recurrent(&engine->memory);
    const bool   rollback  = recurrent && recurrent->seq_pos_max(seq) >= pos;
    *done = can_truncate(*engine, seq, pos) && has_window(*engine, seq, pos) && engine->memory.seq_rm(seq, pos, -1);
    if (*done && rollback) {
        engine->reach[seq] = 0;  // the planes count from the state that was current
    }
    return KVF_STATUS_SUCCESS;
}
