// What of a model can be pooled.
#pragma once

#include "kvf.h"

#include "ggml-backend.h"

#include <string>
#include <vector>

struct llama_context;
struct llama_memory_i;
struct llama_model;
class llama_kv_cache;

// The layers of a page image that one device holds. They lie side by side.
struct kvf_share {
    ggml_backend_dev_t dev;
    int32_t            first_layer;  // among the pooled layers
    int32_t            n_layers;
    int64_t            offset;       // bytes in a page image
    int64_t            size;
};

// The attention cache without a sliding window inside a memory, or null if this kind of memory has none to pool.
llama_kv_cache * kvf_find_pooled(llama_memory_i * memory);

// Why a pool cannot serve this model with this memory, or an empty string.
std::string kvf_refusal(const llama_model & model, llama_memory_i * memory);

// Why a context with a pool cannot have as many sequences as it was made for, more than one; or an empty string.
std::string kvf_sequences_refusal(llama_context & ctx);

// Why a device cannot attend to the cache of its layers, or an empty string. llama.cpp would copy all of it to the CPU in each
// step.
std::string kvf_attention_refusal(llama_context & ctx);

// Who holds the layers, in their order. Throws if those of one device are not side by side.
std::vector<kvf_share> kvf_describe_shares(const llama_kv_cache & kv, const std::vector<kvf_layer> & layers);

// The layers of a page image and its size in bytes; what only an engine knows is left out.
std::vector<kvf_layer> kvf_describe_layers(const llama_model & model, const llama_kv_cache & kv, int64_t & page_bytes);
