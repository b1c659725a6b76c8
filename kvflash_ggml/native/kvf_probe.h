// What of a model can be pooled.
#pragma once

#include "kvf.h"

#include <string>
#include <vector>

struct llama_memory_i;
struct llama_model;
class llama_kv_cache;

// The attention cache without a sliding window inside a memory, or null if this kind of memory has none to pool.
llama_kv_cache * kvf_find_pooled(llama_memory_i * memory);

// Why a pool cannot serve this model with this memory, or an empty string.
std::string kvf_refusal(const llama_model & model, llama_memory_i * memory);

// The layers of a page image and its size in bytes; what only an engine knows is left out.
std::vector<kvf_layer> kvf_describe_layers(const llama_model & model, const llama_kv_cache & kv, int64_t & page_bytes);
