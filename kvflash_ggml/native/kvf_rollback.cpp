// Rollback planes: the recurrent states after the last tokens of a step, beside the current one.
//
// llama.cpp goes back to any plane, whatever it holds: a step of n tokens writes n of them, the others are of earlier steps;
// after a failed step, or with another state in place, all of them are. So it is asked only where the plane is known.
#include "kvf_rollback.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_state.h"

#include "llama-memory-recurrent.h"

#include <algorithm>

namespace {

bool can_truncate(const kvf_engine & engine, int32_t seq, int32_t pos) {
    const auto * recurrent = kvf_find_recurrent(&engine.memory);
    return !recurrent || pos <= 0 || recurrent->seq_pos_max(seq) + 1 - pos <= engine.reach;
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

int32_t kvf_step_reach(const kvf_engine & engine) {
    return std::min(engine.info.rs_planes, engine.pool.ubatch_tokens - 1);
}

kvf_status kvf_can_truncate(const kvf_engine * engine, int32_t seq, int32_t pos, int32_t * can) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    *can = can_truncate(*engine, seq, pos);
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_truncate(kvf_engine * engine, int32_t seq, int32_t pos, int32_t * done) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    const auto * recurrent = kvf_find_recurrent(&engine->memory);
    const bool   rollback  = recurrent && recurrent->seq_pos_max(seq) >= pos;
    *done = can_truncate(*engine, seq, pos) && engine->memory.seq_rm(seq, pos, -1);
    if (*done && rollback) {
        engine->reach = 0;  // the planes count from the state that was current
    }
    return KVF_STATUS_SUCCESS;
}
