// One step: is the plan possible, and llama_decode.
#include "kvf_error.h"
#include "kvf_rollback.h"
#include "kvf_stage.h"

#include "llama-impl.h"
#include "llama-model.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <string>

namespace {

kvf_status check_sizes(kvf_engine & engine, const kvf_plan & plan) {
    const int32_t most = engine.n_seq_id.size();
    if (plan.n_tokens <= 0 || plan.n_tokens > most) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d tokens in a plan, it takes 1 to %d", plan.n_tokens, most);
    }
    if (plan.n_streamed == 0 && plan.mask_stride < engine.info.n_slots) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "mask rows of %lld values for %d slots", (long long) plan.mask_stride,
                        engine.info.n_slots);
    }
    return KVF_STATUS_SUCCESS;
}

// A cell that is taken would make llama.cpp purge every older position; so would one that is named twice.
kvf_status check_slots(kvf_engine & engine, const kvf_plan & plan) {
    const auto & cells = kvf_access::cells(engine.kv);
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        const auto slot = plan.slot[i];
        if (slot < 0 || slot >= engine.info.n_slots) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "token %d is put in slot %d of %d", i, slot, engine.info.n_slots);
        }
        if (!cells.is_empty(slot)) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "token %d is put in slot %d, which is taken", i, slot);
        }
        if (engine.slot_in[slot] == engine.n_plans) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "token %d is put in slot %d, as one before it", i, slot);
        }
        engine.slot_in[slot] = engine.n_plans;
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status check_positions(kvf_engine & engine, const kvf_plan & plan) {
    auto & last = engine.last_pos;
    std::fill(last.begin(), last.end(), -1);
    const bool shared  = plan.embd && engine.info.n_pos > 1;  // rows of an image
    const bool several = std::any_of(plan.seq, plan.seq + plan.n_tokens, [&](int32_t seq) { return seq != plan.seq[0]; });
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        const auto seq = plan.seq[i];
        if (const auto status = kvf_check_seq(engine, seq)) {
            return status;
        }
        const auto pos = plan.pos[i];
        if (pos < 0 || pos < last[seq]) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "token %d has position %d, after %d", i, pos, last[seq]);
        }
        if (pos == last[seq] && !engine.info.branches && !shared) {
            return kvf_fail(KVF_STATUS_UNSUPPORTED, "token %d has the position of another, %d: the memory of this model "
                            "(sliding window, recurrent state or n-grams) has no branches", i, pos);
        }
        if (pos == last[seq] && several) {
            return kvf_fail(KVF_STATUS_UNSUPPORTED, "token %d has the position of another, %d: a step of several sequences "
                            "has no branches", i, pos);
        }
        last[seq] = pos;
    }
    return KVF_STATUS_SUCCESS;
}

// Recurrent state of several sequences advances in one ubatch, by equally many tokens. llama.cpp would split any other step, and
// the planes would be those of its last part.
kvf_status check_shares(kvf_engine & engine, const kvf_plan & plan) {
    if (!engine.info.recurrent || std::all_of(plan.seq, plan.seq + plan.n_tokens, [&](int32_t seq) { return seq == plan.seq[0]; })) {
        return KVF_STATUS_SUCCESS;
    }
    std::vector<int32_t> n(engine.info.n_seq);
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        n[plan.seq[i]]++;
    }
    const auto most = *std::max_element(n.begin(), n.end());
    const auto less = std::find_if(n.begin(), n.end(), [most](int32_t count) { return count > 0 && count < most; });
    if (less != n.end()) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "a step has %d tokens of sequence %d and %d of another: where a model has recurrent "
                        "state, it has equally many of each", *less, (int32_t) (less - n.begin()), most);
    }
    const int32_t n_ubatch = engine.ctx.get_cparams().n_ubatch;
    if (plan.n_tokens > n_ubatch) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "a step has %d tokens of several sequences: where a model has recurrent state, it "
                        "has up to n_ubatch, %d", plan.n_tokens, n_ubatch);
    }
    return KVF_STATUS_SUCCESS;
}

// llama.cpp refuses positions that do not follow what is in memory, but takes any where that is empty.
kvf_status check_memory(kvf_engine & engine, const kvf_plan & plan) {
    auto & seen = engine.last_pos;
    std::fill(seen.begin(), seen.end(), -1);
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        const auto seq = plan.seq[i];
        if (seen[seq] == -1 && plan.pos[i] > 0 && engine.memory.seq_pos_max(seq) < 0) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "token %d has position %d, but the memory of the context is empty: it was "
                            "cleared behind this library. reset() makes it usable again", i, plan.pos[i]);
        }
        seen[seq] = plan.pos[i];
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status check_query_rows(kvf_engine & engine, const kvf_plan & plan) {
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        const auto row = plan.query_row[i];
        if (row == -1) {
            continue;
        }
        if (row < 0 || row >= engine.info.query_rows) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "the query of token %d is put in row %d of %d", i, row,
                            engine.info.query_rows);
        }
        if (engine.row_in[row] == engine.n_plans) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "the query of token %d is put in row %d, as one before it", i, row);
        }
        engine.row_in[row] = engine.n_plans;
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status check_media(kvf_engine & engine, const kvf_plan & plan) {
    const auto & info = engine.info;
    if (plan.embd && engine.ctx.get_model().hparams.ple_n_heads > 0) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "this model has n-gram inputs, and rows of media have no tokens to make them of");
    }
    if (plan.embd && info.n_pos > 1 && info.n_swa > 0) {  // a window counts positions
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "rows of media share positions, and this model has a sliding window");
    }
    const int32_t n_ubatch = engine.ctx.get_cparams().n_ubatch;
    if (plan.mutual && plan.n_tokens > n_ubatch) {  // llama.cpp aborts
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d rows that see each other in a step, it takes up to n_ubatch, %d", plan.n_tokens, n_ubatch);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status check(kvf_engine & engine, const kvf_plan & plan) {
    ++engine.n_plans;
    for (auto part : { check_sizes, check_slots, check_positions, check_shares, check_memory, check_query_rows, check_media }) {
        if (const auto status = part(engine, plan)) {
            return status;
        }
    }
    return plan.n_streamed == 0 ? KVF_STATUS_SUCCESS : kvf_stream_check(engine, plan);
}

kvf_status decode(kvf_engine & engine, const kvf_plan & plan, const llama_batch & batch) {
    kvf_reach reach(engine, plan);
    try {
        const int code = llama_decode(&engine.ctx, batch);
        if (code == 0) {
            reach.computed();
            return KVF_STATUS_SUCCESS;
        }
        if (code == -1 || code == 1) {  // an impossible batch, or no place for it
            reach.kept();
        } else {
            reach.failed();
        }
        const std::string why = code == -3 ? kvf_guard_reason() : "";
        return kvf_fail(KVF_STATUS_DECODE, "llama_decode returned %d for %d tokens%s%s", code, batch.n_tokens,
                        why.empty() ? "" : ": ", why.c_str());
    } catch (const std::exception & err) {
        reach.failed();
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
        return kvf_fail(KVF_STATUS_DECODE, "llama_decode failed for %d tokens: %s", batch.n_tokens, err.what());
    }
}

kvf_status read_pool(kvf_engine & engine, const kvf_plan & plan, const llama_batch & batch) {
    if (engine.pool.stages) {
        engine.pool.stages->reserved = false;
    }
    return decode(engine, plan, batch);
}

// It was computed, but wrong.
void take_back(kvf_engine & engine, const kvf_plan & plan) {
    auto & cells = kvf_access::cells(engine.kv);
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        engine.reach[plan.seq[i]] = -1;
        cells.rm(plan.slot[i]);
    }
}

kvf_status stream(kvf_engine & engine, const kvf_plan & plan, const llama_batch & batch) {
    if (plan.n_tokens > KVF_BLOCK && !engine.pool.stages->reserved) {  // a prompt: longer steps follow
        if (const auto status = kvf_stages_reserve(engine)) {
            return status;
        }
    }
    kvf_stream_begin(engine, plan);
    const auto decoded = decode(engine, plan, batch);
    const auto status  = kvf_stream_end(engine, decoded);
    if (status && !decoded) {
        take_back(engine, plan);
    }
    return status;
}

// Did every server answer? Who reads logits waits for the compute anyway.
kvf_status check_answers(kvf_engine & engine, const kvf_plan & plan, kvf_status decoded) {
    if (engine.servers.empty()) {
        return decoded;
    }
    if (std::any_of(plan.output, plan.output + plan.n_tokens, [](int8_t output) { return output != 0; })) {
        llama_synchronize(&engine.ctx);
    }
    const auto status = kvf_check_lost(&engine);
    if (status && !decoded) {
        take_back(engine, plan);
    }
    return status ? status : decoded;
}

}  // namespace

kvf_status kvf_check_seq(const kvf_engine & engine, int32_t seq) {
    if (seq < 0 || seq >= engine.info.n_seq) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "sequence %d: the context is made for %d, from 0 on", seq, engine.info.n_seq);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_step(kvf_engine * engine, const kvf_plan * plan) {
    if (const auto status = check(*engine, *plan)) {
        return status;
    }
    if (const auto status = kvf_check_lost(engine)) {
        return status;
    }
    engine->tickets.compute_waits(engine->lanes, std::max(plan->wait, engine->compute_barrier));
    engine->compute_barrier = 0;
    if (engine->shares_host) {
        llama_synchronize(&engine->ctx);  // the last step may still read its inputs, which this one overwrites
    }

    for (int32_t i = 0; i < plan->n_tokens; ++i) {
        engine->seq_id[i] = const_cast<int32_t *>(plan->seq + i);
    }
    llama_batch batch {};
    batch.n_tokens = plan->n_tokens;
    batch.token    = plan->embd ? nullptr : const_cast<int32_t *>(plan->token);
    batch.embd     = const_cast<float *>(plan->embd);
    batch.pos      = const_cast<int32_t *>(plan->pos);
    batch.n_seq_id = engine->n_seq_id.data();
    batch.seq_id   = engine->seq_id.data();
    batch.logits   = const_cast<int8_t *>(plan->output);

    if (plan->mutual) {
        llama_set_causal_attn(&engine->ctx, false);
    }
    engine->pool.plan = plan;
    engine->pool.view = plan->n_streamed == 0 ? kvf_view(*engine, *plan) : kvf_span {};
    const auto start  = std::chrono::steady_clock::now();
    const auto decoded = plan->n_streamed == 0 ? read_pool(*engine, *plan, batch) : stream(*engine, *plan, batch);
    const auto status  = check_answers(*engine, *plan, decoded);
    engine->decode_ns += (std::chrono::steady_clock::now() - start).count();
    engine->pool.plan = nullptr;
    if (plan->mutual) {
        llama_set_causal_attn(&engine->ctx, true);
    }
    engine->pool.view = {};
    engine->features.n_rows = status == KVF_STATUS_SUCCESS ? plan->n_tokens : 0;
    return status;
}

void kvf_synchronize(kvf_engine * engine) {
    llama_synchronize(&engine->ctx);
    kvf_wait(engine, engine->tickets.last());
}

uint64_t kvf_decode_ns(const kvf_engine * engine) {
    return engine->decode_ns;
}
