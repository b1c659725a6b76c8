// An engine is made, described and freed.
#include "kvf_engine.h"

#include "kvf_device.h"
#include "kvf_error.h"
#include "kvf_probe.h"
#include "kvf_remote.h"
#include "kvf_rollback.h"
#include "kvf_state.h"

#include "llama-kv-cache-iswa.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <string>

namespace {

std::string context_refusal(llama_context & ctx) {
    auto * memory  = ctx.get_memory();
    auto   refusal = kvf_refusal(ctx.get_model(), memory);
    if (refusal.empty() && !kvf_find_pooled(memory)->pool) {
        refusal = "the context was made without a pool";
    }
    if (refusal.empty() && ctx.get_cparams().n_seq_max != 1) {
        refusal = kvf_sequences_refusal(ctx);
    }
    if (refusal.empty()) {
        refusal = kvf_attention_refusal(ctx);
    }
    return refusal.empty() ? kvf_planes_refusal(ctx) : refusal;
}

// A step multiplies with all of these weights, or some of the experts. Of the embedding it looks up one row.
bool is_computed(const std::string & name) {
    return name.rfind("blk.", 0) == 0 || name.rfind("output", 0) == 0;
}

// Has the CPU a part in every step?
bool computes_on_host(const llama_model & model) {
    return std::any_of(model.tensors_by_name.begin(), model.tensors_by_name.end(), [](const auto & named) {
        const auto & [name, tensor] = named;
        return is_computed(name) && tensor->buffer && ggml_backend_buffer_is_host(tensor->buffer);
    });
}

}  // namespace

kvf_engine::kvf_engine(llama_context & ctx, llama_memory_i & memory, llama_kv_cache & kv)
    : ctx(ctx), memory(memory), kv(kv), pool(*kv.pool) {
    const auto & model   = ctx.get_model();
    const auto & cparams = ctx.get_cparams();
    layers = kvf_describe_layers(model, kv, info.page_bytes);

    info.n_slots      = kv.get_size();
    info.n_layers     = layers.size();
    info.n_seq        = cparams.n_seq_max;
    info.n_pos        = model.hparams.n_pos_per_embd();
    info.n_embd       = model.hparams.n_embd_inp();
    info.n_swa        = kvf_find_iswa(&memory) ? model.hparams.n_swa : 0;
    if (const auto * recurrent = kvf_find_recurrent(&memory)) {
        info.recurrent = 1;
        info.rs_planes = recurrent->n_rs_seq;
    }
    info.alibi        = model.hparams.use_alibi;
    info.mask_f32     = !cparams.flash_attn;
    info.v_trans      = kvf_access::v_trans(kv);
    info.branches     = !kvf_find_iswa(&memory) && !info.recurrent && model.hparams.ple_n_heads == 0;
    info.windows_mutual = model.hparams.non_causal_type == LLAMA_NON_CAUSAL_TYPE_SWA_ONLY;
    info.query_rows   = pool.query_rows;
    info.rotated      = kvf_access::rotated(kv);
    info.host_compute = computes_on_host(model);
    info.n_threads    = cparams.n_threads;
    info.device_bytes = info.page_bytes*(info.n_slots/KVF_BLOCK);
    info.step_work    = kvf_model_work(&model);
    snprintf(info.type_k, sizeof(info.type_k), "%s", ggml_type_name(kv.type_k()));
    snprintf(info.type_v, sizeof(info.type_v), "%s", layers[0].has_v ? ggml_type_name(kv.type_v()) : "");

    n_seq_id.assign(cparams.n_batch, 1);
    seq_id.assign(cparams.n_batch, nullptr);
    last_pos.resize(info.n_seq);
    held.resize(info.n_seq);
    reach.resize(info.n_seq);
    stashes.resize(info.n_seq);
    slot_in.resize(info.n_slots);
    row_in.resize(info.query_rows);
    servers = kvf_endpoints(ctx);
    kvf_lanes_init(*this);
}

int64_t kvf_model_work(const void * model_ptr) {
    const auto & model   = *(const llama_model *) model_ptr;
    const auto & hparams = model.hparams;
    int64_t      res = 0, output = 0, embedding = 0;
    for (const auto & [name, tensor] : model.tensors_by_name) {
        const auto size = ggml_nelements(tensor);
        if (name == "token_embd.weight") {
            embedding = size;
        } else if (name == "output.weight") {
            output = size;
        } else if (is_computed(name) && tensor->ne[1] > 1) {
            const bool experts = hparams.n_expert > 0 && name.find("exps.") != std::string::npos;
            res += experts ? size/hparams.n_expert*hparams.n_expert_used_max() : size;
        }
    }
    return res + (output > 0 ? output : embedding);  // one tensor can be both
}

int kvf_abi(void) {
    return KVF_ABI;
}

int64_t kvf_sizeof(int which) {
    switch (which) {
        case 0:  return sizeof(llama_context_params);
        case 1:  return sizeof(llama_model_params);
        case 2:  return sizeof(llama_batch);
        default: return 0;
    }
}

kvf_status kvf_engine_init(void * ctx_ptr, kvf_engine ** engine) {
    auto & ctx = *(llama_context *) ctx_ptr;
    try {
        const auto refusal = context_refusal(ctx);
        if (!refusal.empty()) {
            return kvf_fail(KVF_STATUS_REFUSED, "%s", refusal.c_str());
        }
        *engine = new kvf_engine(ctx, *ctx.get_memory(), *kvf_find_pooled(ctx.get_memory()));
        return KVF_STATUS_SUCCESS;
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_REFUSED, "%s", err.what());
    }
}

void kvf_engine_free(kvf_engine * engine) {
    kvf_synchronize(engine);
    if (engine->pool.stages) {
        kvf_access::expect_buffers(engine->ctx);
    }
    delete engine;
}

void kvf_get_info(const kvf_engine * engine, kvf_info * info) {
    *info = engine->info;
}

std::vector<kvf_layer> kvf_layers(const kvf_engine & engine) {
    auto res = engine.layers;
    for (auto & l : res) {
        const auto query = engine.pool.queries.find(l.il);
        l.scale = query == engine.pool.queries.end() ? 0.0f : query->second.scale;
    }
    return res;
}

kvf_status kvf_get_layers(const kvf_engine * engine, kvf_layer * layers, int32_t n) {
    if (n != engine->info.n_layers) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d layers, there are %d", n, engine->info.n_layers);
    }
    const auto known = kvf_layers(*engine);
    std::copy(known.begin(), known.end(), layers);
    return KVF_STATUS_SUCCESS;
}
