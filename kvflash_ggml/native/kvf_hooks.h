// The functions that the patched llama.cpp sources call. Behind them are kvf_pool.cpp, kvf_query.cpp, kvf_stage.cpp and
// kvf_top.cpp.
#pragma once

#include "llama-kv-cache.h"

#include <memory>

struct llama_context;
class  llm_graph_result;

// Called by the constructor of an attention cache without a sliding window. Returns null, and leaves kv_size alone,
// unless the creating thread has asked for a pool with kvf_set_pool(). Throws if the cache would have several streams.
std::shared_ptr<kvf_pool> kvf_pool_create(llama_kv_cache & kv, uint32_t & kv_size);

// Fills res with the planned slots of the ubatch. Returns false if no plan is set: the decode then fails cleanly.
bool kvf_plan_slots(kvf_pool & pool, const llama_ubatch & ubatch, llama_kv_cache::slot_info & res);

// Copies the planned mask rows of the ubatch into dst. Returns false if no plan is set.
bool kvf_plan_mask(const kvf_pool & pool, ggml_tensor * dst, const llama_ubatch * ubatch);

// Appends to the graph the copy of the queries of layer il that the plan keeps. Does nothing unless capture was asked for.
void kvf_capture_query(kvf_pool & pool, llm_graph_result & res, ggml_context * ctx, ggml_cgraph * gf,
                       ggml_tensor * q_cur, float kq_scale, int il);

// While a streamed step is computed, or memory for one is reserved, attention reads the stages (see kvf_stage.h). In other
// steps of several sequences it reads the slots of those that are in the step. Otherwise, and without a pool, these return what
// they are given. Layers are counted among those of the cache.
uint32_t      kvf_stage_n_kv(const kvf_pool * pool, uint32_t n_kv);
ggml_tensor * kvf_stage_k   (const kvf_pool * pool, ggml_context * ctx, size_t layer, ggml_tensor * k);
ggml_tensor * kvf_stage_v   (const kvf_pool * pool, ggml_context * ctx, size_t layer, ggml_tensor * v);

// Appends to the node that writes rows to the pool one that writes them to the stage.
ggml_tensor * kvf_stage_rows(const kvf_pool * pool, ggml_context * ctx, size_t layer, bool keys, ggml_tensor * pooled);

// The mask of a streamed step, or null. The first call for a graph.
ggml_tensor * kvf_stage_mask(const kvf_pool * pool, ggml_context * ctx, int64_t n_tokens);

// Is this mask, of an earlier graph, that of the running step?
bool          kvf_stage_mask_fits(const kvf_pool * pool, const ggml_tensor * mask);

// Where CUDA makes the logits, kvf_logits_top() finds the likeliest token of each row there, and the logits come to the host
// when somebody asks for them; at the end of each step where somebody asked for those of the last one.

// Appends to the graph the likeliest token of each row of logits, and the row's sum, which is a number only if all of it is.
void kvf_find_top(llm_graph_result & res, ggml_backend_dev_t output);

// Do the logits stay where this graph makes them? whole: there are no others of the step.
bool kvf_leave_logits(llama_context & ctx, const llm_graph_result & res, bool whole);

// Copies logits that have stayed, and forgets their graph: somebody asks for them, who may change them.
void kvf_fetch_logits(llama_context & ctx);

// The same where nobody asks: the graph ends here, or its rows change places.
void kvf_settle_logits(llama_context & ctx);
