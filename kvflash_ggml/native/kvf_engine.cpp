#include "kvf_engine.h"

#include "llama-impl.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <chrono>
#include <cstring>
#include <exception>
#include <string>

namespace {

llama_seq_id the_seq = KVF_SEQ;

// The attention cache without a sliding window inside a memory, or null if this kind of memory has none to pool.
llama_kv_cache * find_pooled(llama_memory_i * memory) {
    if (auto * kv = dynamic_cast<llama_kv_cache *>(memory)) {
        return kv;
    }
    if (auto * iswa = dynamic_cast<llama_kv_cache_iswa *>(memory)) {
        return iswa->get_base();
    }
    if (dynamic_cast<llama_memory_hybrid_idx *>(memory)) {
        return nullptr;  // its indexer has a second cache, and counts blocks of cells by position
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_attn();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn()->get_base();
    }
    return nullptr;
}

// Why a pool cannot serve this model, or an empty string.
std::string model_refusal(const llama_model & model) {
    if (llama_model_has_encoder(&model)) {
        return "it has an encoder, and cross-attention is not paged";
    }
    if (llm_arch_is_recurrent(model.arch)) {
        return "it is purely recurrent: its memory does not grow, so there is nothing to page";
    }
    if (model.arch == LLM_ARCH_LLAMA_EMBED) {
        return "it is an embedding model: it reads nothing from a KV cache";
    }
    if (model.arch == LLM_ARCH_GROK) {
        return "llama.cpp runs it without flash attention, which a pool needs";
    }
    if (llm_arch_is_diffusion(model.arch) || !model.hparams.causal_attn) {
        return "its attention is not causal";
    }
    return "";
}

std::string memory_refusal(const llama_model & model, llama_memory_i * memory) {
    if (!memory) {
        return "it keeps no KV cache";
    }
    auto * kv = find_pooled(memory);
    if (!kv) {
        return "its memory type (sparse or indexed attention) is not pooled yet";
    }
    if (kvf_access::layers(*kv).empty()) {
        return "none of its layers has a KV cache without a sliding window";
    }
    return "";
}

void say(char * why, size_t size, const std::string & text) {
    snprintf(why, size, "%s", text.c_str());
}

std::vector<kvf_layer> describe_layers(const llama_model & model, const llama_kv_cache & kv, int64_t & page_bytes) {
    std::vector<kvf_layer> res;
    page_bytes = 0;
    for (const auto & l : kvf_access::layers(kv)) {
        kvf_layer d {};
        d.il        = l.il;
        d.n_head    = model.hparams.n_head(l.il);
        d.head_k    = model.hparams.n_embd_head_k(l.il);
        d.n_head_kv = l.k->ne[0]/d.head_k;  // a latent (MLA) cache holds one
        d.head_v    = model.hparams.n_embd_head_v(l.il);
        d.has_v     = l.v != nullptr;
        d.k_offset  = page_bytes;
        d.k_row     = l.k->nb[1];
        page_bytes += d.k_row*KVF_BLOCK;
        d.v_offset  = page_bytes;
        d.v_row     = l.v ? l.v->nb[1] : 0;
        page_bytes += d.v_row*KVF_BLOCK;
        res.push_back(d);
    }
    return res;
}

bool slots_ok(const kvf_engine & engine, int32_t slot, int32_t n) {
    return slot >= 0 && n >= 0 && slot + n <= engine.info.n_slots;
}

bool plan_ok(const kvf_engine & engine, const kvf_plan & plan) {
    if (plan.n_tokens <= 0 || plan.n_tokens > (int32_t) engine.n_seq_id.size() || plan.mask_stride < engine.info.n_slots) {
        return false;
    }
    const auto & cells = kvf_access::cells(engine.kv);
    for (int32_t i = 0; i < plan.n_tokens; ++i) {
        // a used cell would make llama.cpp purge every older position
        if (!slots_ok(engine, plan.slot[i], 1) || !cells.is_empty(plan.slot[i])) {
            return false;
        }
    }
    return true;
}

}  // namespace

kvf_engine::kvf_engine(llama_context & ctx, llama_memory_i & memory, llama_kv_cache & kv)
    : ctx(ctx), memory(memory), kv(kv), pool(*kv.pool) {
    const auto & model   = ctx.get_model();
    const auto & cparams = ctx.get_cparams();
    layers = describe_layers(model, kv, info.page_bytes);

    info.n_slots      = kv.get_size();
    info.n_layers     = layers.size();
    info.n_pos        = model.hparams.n_pos_per_embd();
    info.n_swa        = kvf_find_iswa(&memory) ? model.hparams.n_swa : 0;
    info.recurrent    = kvf_find_recurrent(&memory) != nullptr;
    info.alibi        = model.hparams.use_alibi;
    info.mask_f32     = !cparams.flash_attn;
    info.v_trans      = kvf_access::v_trans(kv);
    info.query_rows   = pool.query_rows;
    info.rotated      = kvf_access::rotated(kv);
    info.device_bytes = info.page_bytes*(info.n_slots/KVF_BLOCK);
    snprintf(info.type_k, sizeof(info.type_k), "%s", ggml_type_name(kv.type_k()));
    snprintf(info.type_v, sizeof(info.type_v), "%s", layers[0].has_v ? ggml_type_name(kv.type_v()) : "");

    n_seq_id.assign(cparams.n_batch, 1);
    seq_id.assign(cparams.n_batch, &the_seq);
    kvf_devices_open(*this);
}

int kvf_abi(void) {
    return KVF_ABI;
}

int64_t kvf_sizeof(int which) {
    switch (which) {
        case 0:  return sizeof(llama_context_params);
        case 1:  return sizeof(llama_model_params);
        case 2:  return sizeof(llama_batch);
        default: return KVF_E_ARGUMENT;
    }
}

int kvf_probe(const void * model_ptr, int32_t type_k, int32_t type_v, int32_t offload,
              int64_t * slot_bytes, char * why, size_t why_size) {
    const auto & model = *(const llama_model *) model_ptr;
    auto refusal = model_refusal(model);
    if (refusal.empty()) {
        // the smallest cache that the model's own code makes shows which layers would be pooled
        llama_cparams cparams {};
        cparams.n_ctx       = 256;
        cparams.n_ctx_seq   = 256;
        cparams.n_batch     = KVF_BLOCK;
        cparams.n_ubatch    = KVF_BLOCK;
        cparams.n_seq_max   = 1;
        cparams.kv_unified  = true;
        cparams.flash_attn  = true;
        cparams.causal_attn = true;
        cparams.offload_kqv = offload;
        llama_memory_params params {};
        params.type_k = (ggml_type) type_k;
        params.type_v = (ggml_type) type_v;
        try {
            std::unique_ptr<llama_memory_i> memory { model.create_memory(params, cparams) };
            refusal = memory_refusal(model, memory.get());
            if (refusal.empty()) {
                int64_t page_bytes = 0;
                describe_layers(model, *find_pooled(memory.get()), page_bytes);
                *slot_bytes = page_bytes/KVF_BLOCK;
                return 0;
            }
        } catch (const std::exception & err) {
            refusal = err.what();
        }
    }
    say(why, why_size, refusal);
    return KVF_E_REFUSED;
}

int kvf_device_memory(const void * model_ptr, int64_t * free_bytes, int64_t * total_bytes) {
    const auto & model = *(const llama_model *) model_ptr;
    auto * dev = model.devices.empty() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU) : model.devices[0].dev;
    size_t free = 0, total = 0;
    ggml_backend_dev_memory(dev, &free, &total);
    *free_bytes  = free;
    *total_bytes = total;
    return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU ? 0 : 1;
}

int kvf_open(void * ctx_ptr, kvf_engine ** out, char * why, size_t why_size) {
    auto & ctx    = *(llama_context *) ctx_ptr;
    auto * memory = ctx.get_memory();
    auto refusal  = model_refusal(ctx.get_model());
    if (refusal.empty()) {
        refusal = memory_refusal(ctx.get_model(), memory);
    }
    if (refusal.empty() && !find_pooled(memory)->pool) {
        refusal = "the context was made without a pool";
    }
    if (refusal.empty()) {
        try {
            *out = new kvf_engine(ctx, *memory, *find_pooled(memory));
            return 0;
        } catch (const std::exception & err) {
            refusal = err.what();
        }
    }
    say(why, why_size, refusal);
    return KVF_E_REFUSED;
}

void kvf_close(kvf_engine * engine) {
    kvf_synchronize(engine);
    delete engine;
}

void kvf_get_info(const kvf_engine * engine, kvf_info * out) {
    *out = engine->info;
}

std::vector<kvf_layer> kvf_layers(const kvf_engine * engine) {
    auto res = engine->layers;
    for (auto & l : res) {
        const auto query = engine->pool.queries.find(l.il);
        l.scale = query == engine->pool.queries.end() ? 0.0f : query->second.scale;
    }
    return res;
}

int kvf_get_layers(const kvf_engine * engine, kvf_layer * out, int32_t n) {
    if (n != (int32_t) engine->layers.size()) {
        return KVF_E_ARGUMENT;
    }
    const auto layers = kvf_layers(engine);
    std::copy(layers.begin(), layers.end(), out);
    return 0;
}

int kvf_step(kvf_engine * engine, const kvf_plan * plan) {
    if (!plan_ok(*engine, *plan)) {
        return KVF_E_ARGUMENT;
    }
    kvf_compute_waits(*engine, std::max(plan->wait, engine->compute_barrier));
    engine->compute_barrier = 0;

    llama_batch batch {};
    batch.n_tokens = plan->n_tokens;
    batch.token    = const_cast<int32_t *>(plan->token);
    batch.pos      = const_cast<int32_t *>(plan->pos);
    batch.n_seq_id = engine->n_seq_id.data();
    batch.seq_id   = engine->seq_id.data();
    batch.logits   = const_cast<int8_t *>(plan->output);

    engine->pool.plan = plan;
    const auto start = std::chrono::steady_clock::now();
    int code = KVF_E_DECODE;
    try {
        code = llama_decode(&engine->ctx, batch);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: %s\n", __func__, err.what());
    }
    engine->decode_ns += (std::chrono::steady_clock::now() - start).count();
    engine->pool.plan = nullptr;
    return code;
}

void kvf_synchronize(kvf_engine * engine) {
    llama_synchronize(&engine->ctx);
    kvf_wait(engine, engine->last_ticket);
}

uint64_t kvf_decode_ns(const kvf_engine * engine) {
    return engine->decode_ns;
}

int kvf_cells_clear(kvf_engine * engine, int32_t slot, int32_t n) {
    if (!slots_ok(*engine, slot, n)) {
        return KVF_E_ARGUMENT;
    }
    auto & cells = kvf_access::cells(engine->kv);
    for (int32_t i = slot; i < slot + n; ++i) {
        if (!cells.is_empty(i)) {
            cells.rm(i);
        }
    }
    return 0;
}

int kvf_cells_set(kvf_engine * engine, int32_t slot, int32_t n, int32_t pos, const int32_t * token) {
    if (pos < 0 || kvf_cells_clear(engine, slot, n) != 0) {
        return KVF_E_ARGUMENT;
    }
    auto & cells = kvf_access::cells(engine->kv);
    for (int32_t i = 0; i < n; ++i) {
        llama_kv_cell_ext ext;
        ext.tok = token[i];
        if (engine->info.n_pos > 1) {
            // a text token has the same position on every axis
            ext.x = pos + i;
            ext.y = pos + i;
        }
        cells.pos_set(slot + i, pos + i);
        cells.ext_set(slot + i, ext);
        cells.seq_add(slot + i, KVF_SEQ);
    }
    return 0;
}

int kvf_cells_get(const kvf_engine * engine, int32_t slot, int32_t n, int32_t * pos) {
    if (!slots_ok(*engine, slot, n)) {
        return KVF_E_ARGUMENT;
    }
    const auto & cells = kvf_access::cells(engine->kv);
    for (int32_t i = 0; i < n; ++i) {
        pos[i] = cells.is_empty(slot + i) ? -1 : cells.pos_get(slot + i);
    }
    return 0;
}

int kvf_truncate(kvf_engine * engine, int32_t pos) {
    return engine->memory.seq_rm(KVF_SEQ, pos, -1) ? 1 : 0;
}

void kvf_clear(kvf_engine * engine) {
    kvf_synchronize(engine);
    engine->memory.clear(true);
}

int32_t kvf_swa_first(const kvf_engine * engine) {
    auto * iswa = kvf_find_iswa(&engine->memory);
    return iswa ? iswa->get_swa()->seq_pos_min(KVF_SEQ) : -1;
}
