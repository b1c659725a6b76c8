// The functions that the patched llama.cpp sources call. Behind them are kvf_pool.cpp and kvf_query.cpp.
#pragma once

#include "llama-kv-cache.h"

#include <memory>

class llm_graph_result;

// Called by the constructor of an attention cache without a sliding window. Returns null, and leaves kv_size alone,
// unless the creating thread has asked for a pool with kvf_set_pool(). Throws if the cache would have several streams.
std::shared_ptr<kvf_pool> kvf_pool_create(llama_kv_cache & kv, uint32_t & kv_size);

// Fills res with the planned slots of the ubatch. Returns false if no plan is set: the decode then fails cleanly.
bool kvf_plan_slots(const kvf_pool & pool, const llama_ubatch & ubatch, llama_kv_cache::slot_info & res);

// Copies the planned mask rows of the ubatch into dst. Returns false if no plan is set.
bool kvf_plan_mask(const kvf_pool & pool, ggml_tensor * dst, const llama_ubatch * ubatch);

// Appends to the graph the copy of the queries of layer il that the plan keeps. Does nothing unless capture was asked for.
void kvf_capture_query(kvf_pool & pool, llm_graph_result & res, ggml_context * ctx, ggml_cgraph * gf,
                       ggml_tensor * q_cur, float kq_scale, int il);
