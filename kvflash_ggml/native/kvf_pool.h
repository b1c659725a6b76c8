// What the engine shares with the patched cache: the plan of the running decode, and the captured queries.
#pragma once

#include "kvf.h"
#include "kvf_hooks.h"

#include "ggml-cpp.h"
#include "llama-context.h"

#include <map>
#include <memory>
#include <vector>

// The patches make this struct a friend of llama_kv_cache and llama_context.
struct kvf_access {
    static auto & layers(const llama_kv_cache & kv) { return kv.layers; }
    static auto & cells(llama_kv_cache & kv) { return kv.v_cells[0]; }
    static auto & head(llama_kv_cache & kv) { return kv.v_heads[0]; }
    static auto & hparams(const llama_kv_cache & kv) { return kv.hparams; }
    static bool   v_trans(const llama_kv_cache & kv) { return kv.v_trans; }
    static int    rotated(const llama_kv_cache & kv) { return kv.attn_rot_k | kv.attn_rot_v << 1; }
    static auto & cparams(llama_context & ctx) { return ctx.cparams; }
    static auto & compute_buffers(const llama_context & ctx) { return ctx.backend_buft; }
    static auto & compute_sizes(const llama_context & ctx) { return ctx.backend_buf_exp_size; }  // by these
    static void   expect_buffers(llama_context & ctx);  // of the sizes that they have
    static void   reserve(llama_context & ctx);
    static bool   set_logits(llama_context & ctx, const float * row);
    static bool   has_logits(const llama_context & ctx, int32_t row);
    static bool   leave_logits(llama_context & ctx, const llm_graph_result & res, bool whole);
    static void   settle_logits(llama_context & ctx, bool wanted);
    static bool   find_top(llama_context & ctx, int32_t n, const int32_t * row, int32_t * id);
};

class  kvf_query_index;  // kvf_query.cpp
struct kvf_stages;       // kvf_stage.h

// The queries of a layer that plans have kept.
struct kvf_query {
    ggml_tensor * rows;         // F32 [n_head*head_k, query_rows + 1], the last one for what nobody wants
    float         scale = 0.0f; // once a graph has kept them
};

// Those of the layers of one device, side by side, so that one copy reads them all.
struct kvf_ring {
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           all;          // F32, the rows of each layer in turn
    int32_t                 first_layer;  // among the layers of the cache
};

// Slots from `first` on, before `end`.
struct kvf_span {
    int32_t first = 0;
    int32_t end   = 0;
};

struct kvf_pool {
    llama_kv_cache & kv;
    const uint32_t   query_rows;

    const kvf_plan * plan = nullptr;  // set while llama_decode runs
    kvf_span         view;  // slots that the running step attends to; empty: those that llama.cpp would
    int32_t          ubatch_tokens = 0;  // of the newest ubatch, the last one of a step that has ended

    std::vector<kvf_ring>    rings;
    std::map<int, kvf_query> queries;       // by model layer
    kvf_query_index *        query_index = nullptr;  // of the graph under construction

    std::shared_ptr<kvf_stages> stages;  // null until they are made

    kvf_pool(llama_kv_cache & kv, uint32_t query_rows) : kv(kv), query_rows(query_rows) {}
};
