#include "kvf_probe.h"

#include "kvf_device.h"
#include "kvf_error.h"
#include "kvf_guard.h"
#include "kvf_pool.h"
#include "kvf_rollback.h"
#include "kvf_state.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-idx.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-model.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <stdexcept>

namespace {

std::string model_refusal(const llama_model & model) {
    if (llama_model_has_encoder(&model)) {
        return "it has an encoder, and cross-attention is not paged";
    }
    if (llm_arch_is_recurrent(model.arch)) {
        return "it is purely recurrent: its memory does not grow, so there is nothing to page";
    }
    if (model.arch == LLM_ARCH_LLAMA_EMBED) {
        return "it is an encoder: it reads nothing from a KV cache";
    }
    if (model.arch == LLM_ARCH_GROK) {
        return "llama.cpp runs it without flash attention, which a pool needs";
    }
    if (llm_arch_is_diffusion(model.arch)) {
        return "it writes by diffusion, and not token by token";
    }
    if (!model.hparams.causal_attn) {
        return "it is an encoder: its attention is not causal";
    }
    return "";
}

std::string memory_refusal(llama_memory_i * memory) {
    if (!memory) {
        return "it keeps no KV cache";
    }
    auto * kv = kvf_find_pooled(memory);
    if (!kv) {
        return "its memory type (sparse or indexed attention) is not pooled yet";
    }
    if (kvf_access::layers(*kv).empty()) {
        return "none of its layers has a KV cache without a sliding window";
    }
    return "";
}

// The windows of all sequences at their longest, and a step.
std::string window_refusal(llama_context & ctx) {
    auto * iswa = kvf_find_iswa(ctx.get_memory());
    if (!iswa) {
        return "";
    }
    const auto & cparams = ctx.get_cparams();
    const auto   cells   = iswa->get_swa()->get_size();
    const auto   needed  = std::min(ctx.get_model().hparams.n_swa, cparams.n_ctx_seq)*cparams.n_seq_max + cparams.n_ubatch;
    return cells >= needed ? "" : "sliding windows of " + std::to_string(cparams.n_seq_max) + " sequences and a step need "
           + std::to_string(needed) + " cells, and there are " + std::to_string(cells) + ": n_ctx must be as large, or n_seq_max smaller";
}

// What llama_init_from_model makes no context with: the smallest memory would fail an assertion, and end the process.
std::string type_refusal(const llama_model & model, int32_t type_k, int32_t type_v) {
    for (const bool is_k : { true, false }) {
        const auto type  = (ggml_type) (is_k ? type_k : type_v);
        const auto block = ggml_blck_size(type);
        for (uint32_t il = 0; il < model.hparams.n_layer(); ++il) {
            const auto head = is_k ? model.hparams.n_embd_head_k(il) : model.hparams.n_embd_head_v(il);
            if (head % block) {
                return std::string(is_k ? "type_k=" : "type_v=") + std::to_string(type) + " (" + ggml_type_name(type) + ") is stored in blocks of "
                     + std::to_string(block) + " values, and a head of this model has " + std::to_string(head)
                     + ": take a type of smaller blocks, or f16 (1), which has none";
            }
        }
    }
    return "";
}

// The smallest memory that the model's own code makes: it shows which layers would be pooled.
std::unique_ptr<llama_memory_i> smallest_memory(const llama_model & model, int32_t type_k, int32_t type_v, int32_t offload) {
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
    return std::unique_ptr<llama_memory_i> { model.create_memory(params, cparams) };
}

}  // namespace

llama_kv_cache * kvf_find_pooled(llama_memory_i * memory) {
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

std::string kvf_refusal(const llama_model & model, llama_memory_i * memory) {
    const auto refusal = model_refusal(model);
    return refusal.empty() ? memory_refusal(memory) : refusal;
}

std::string kvf_sequences_refusal(llama_context & ctx) {
    auto *       memory = ctx.get_memory();
    const auto * what   = kvf_find_recurrent(memory) && kvf_find_iswa(memory) ? "recurrent state beside a sliding window is kept for one"
                        : ctx.get_model().hparams.ple_n_heads != 0            ? "its n-gram inputs are those of one"
                        : !ctx.get_cparams().flash_attn                       ? "without flash attention a pool serves one"
                                                                              : nullptr;
    return what ? "the context is made for " + std::to_string(ctx.get_cparams().n_seq_max) + " sequences, and " + what
                      + ": n_seq_max must be 1"
                : window_refusal(ctx);
}

std::vector<kvf_layer> kvf_describe_layers(const llama_model & model, const llama_kv_cache & kv, int64_t & page_bytes) {
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

std::vector<kvf_share> kvf_describe_shares(const llama_kv_cache & kv, const std::vector<kvf_layer> & layers) {
    std::vector<kvf_share> res;
    const auto & cached = kvf_access::layers(kv);
    for (size_t i = 0; i < layers.size(); ++i) {
        const auto & l   = layers[i];
        auto *       dev = kvf_device_of(cached[i].k);
        if (res.empty() || res.back().dev != dev) {
            if (std::any_of(res.begin(), res.end(), [dev](const auto & share) { return share.dev == dev; })) {
                throw std::runtime_error(std::string("the layers on ") + ggml_backend_dev_name(dev) + " are not side by side");
            }
            res.push_back({ dev, (int32_t) i, 0, l.k_offset, 0 });
        }
        res.back().n_layers++;
        res.back().size += (l.k_row + l.v_row)*KVF_BLOCK;
    }
    return res;
}

std::string kvf_attention_refusal(llama_context & ctx) {
    const auto & model = ctx.get_model();
    if (!ctx.get_cparams().offload_kqv) {
        return "";
    }
    for (const auto & node : ctx.get_gf_res_reserve()->get_fused_nodes()) {
        auto * dev = model.dev_layer(node.il);
        if (node.op != LLM_FUSED_OP_FLASH_ATTN || kvf_is_cpu(dev) || ggml_backend_dev_supports_op(dev, node.tensor)) {
            continue;
        }
        const auto * k = node.tensor->src[1];
        return std::string(ggml_backend_dev_name(dev)) + " (" + kvf_backend_name(dev) + ") cannot attend to layer "
             + std::to_string(node.il) + ": flash attention with " + std::to_string(k->ne[0]) + " values a head, K of type "
             + ggml_type_name(k->type) + " and V of type " + ggml_type_name(node.tensor->src[2]->type)
             + ". Use another type for the cache, or keep it in host memory (offload_kqv=False)";
    }
    return "";
}

kvf_status kvf_probe(const void * model_ptr, int32_t type_k, int32_t type_v, int32_t offload, int64_t * slot_bytes, int32_t n) {
    const auto & model = *(const llama_model *) model_ptr;
    if (n != kvf_model_n_devices(model_ptr)) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices, there are %d", n, kvf_model_n_devices(model_ptr));
    }
    try {
        const kvf_guard guard;
        auto refusal = model_refusal(model);
        if (refusal.empty()) {
            const auto wrong = type_refusal(model, type_k, type_v);
            if (!wrong.empty()) {
                return kvf_fail(KVF_STATUS_ARGUMENT, "%s", wrong.c_str());
            }
            const auto memory = smallest_memory(model, type_k, type_v, offload);
            refusal = memory_refusal(memory.get());
            if (refusal.empty()) {
                const auto & kv         = *kvf_find_pooled(memory.get());
                int64_t      page_bytes = 0;
                const auto   layers     = kvf_describe_layers(model, kv, page_bytes);
                std::fill(slot_bytes, slot_bytes + n, 0);
                for (const auto & share : kvf_describe_shares(kv, layers)) {
                    const auto at = std::find_if(model.devices.begin(), model.devices.end(),
                                                 [&](const auto & device) { return device.dev == share.dev; });
                    slot_bytes[at - model.devices.begin()] += share.size/KVF_BLOCK;
                }
                return KVF_STATUS_SUCCESS;
            }
        }
        return kvf_fail(KVF_STATUS_REFUSED, "%s", refusal.c_str());
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_REFUSED, "%s", err.what());
    }
}

int64_t kvf_plane_bytes(const void * model_ptr) {
    const auto & model = *(const llama_model *) model_ptr;
    if (!llm_arch_supports_rs_rollback(model.arch)) {
        return 0;
    }
    try {
        const kvf_guard guard;
        const auto memory = smallest_memory(model, GGML_TYPE_F16, GGML_TYPE_F16, /*.offload =*/ 0);
        const auto * recurrent = kvf_find_recurrent(memory.get());
        return recurrent ? kvf_recurrent_bytes(*recurrent) : 0;
    } catch (const std::exception &) {
        return 0;  // kvf_probe tells why
    }
}
