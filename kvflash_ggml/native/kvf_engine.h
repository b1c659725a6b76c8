// The engine of one context: its pooled cache, its devices, its transfers.
#pragma once

#include "kvf_device_index.h"
#include "kvf_lane.h"
#include "kvf_pool.h"
#include "kvf_stash.h"
#include "kvf_ticket.h"

#include "llama-context.h"

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

// What is kept of the compute of a step for drafters.
struct kvf_features {
    std::vector<int32_t> layers;         // whose inputs
    bool                 nextn  = false;
    int32_t              width  = 0;     // values a token, 0: nothing is kept
    int32_t              n_rows = 0;     // tokens of the last step, 0: there is nothing to read
};

struct kvf_engine {
    llama_context &  ctx;
    llama_memory_i & memory;
    llama_kv_cache & kv;
    kvf_pool &       pool;

    std::vector<kvf_layer> layers;
    std::vector<kvf_lane>  lanes;
    std::vector<std::string> servers;         // endpoints that compute for the context
    kvf_info               info {};
    std::vector<kvf_span>  held;              // [n_seq] no cell of the sequence is outside
    std::vector<int32_t>   reach;             // [n_seq] tokens that recurrent state can go back, -1: it is not known what it holds

    std::vector<kvf_lane *>    by_mode;                // those that hold nobody up first
    ggml_backend_buffer_type_t host_buft   = nullptr;  // of page images
    bool                       shares_host = false;    // a device computes with host memory where it is

    // What is sent to a remote device is read of host memory at once, and not in its turn: of each image the page-out, if there
    // are such devices.
    std::unordered_map<uint64_t, uint64_t> written;

    kvf_tickets tickets;
    uint64_t    compute_barrier = 0;  // the next compute waits for this transfer
    uint64_t decode_ns       = 0;

    // of a step, made once
    std::vector<int32_t>        n_seq_id;  // [n_batch] all 1
    std::vector<llama_seq_id *> seq_id;    // [n_batch]
    std::vector<int32_t>        last_pos;  // [n_seq]
    std::vector<uint64_t>       slot_in;   // [n_slots] the last plan that named a slot
    std::vector<uint64_t>       row_in;    // [query_rows] the last plan that named a row for a query
    uint64_t                    n_plans = 0;

    kvf_features features;
    std::vector<kvf_stash> stashes;  // [n_seq]
    std::unique_ptr<kvf_device_index> device_index;  // null: the host scores all

    std::mutex                           host_mutex;  // slabs are pinned by a background thread
    std::vector<ggml_backend_buffer_ptr> host;

    kvf_engine(llama_context & ctx, llama_memory_i & memory, llama_kv_cache & kv);
};

std::vector<kvf_layer> kvf_layers(const kvf_engine & engine);  // with the scale of the newest graph

// The sequence is about to have cells here.
void kvf_hold(kvf_engine & engine, int32_t seq, int32_t slot, int32_t n);

// The slots that the sequences of a plan have, those of the plan with them, in whole parts of KVF_STAGE_PAD. Empty where one
// sequence has all slots.
kvf_span kvf_view(kvf_engine & engine, const kvf_plan & plan);

// Is there such a sequence?
kvf_status kvf_check_seq(const kvf_engine & engine, int32_t seq);

// Have graphs kept queries?
kvf_status kvf_check_captured(const kvf_engine & engine);

// Are these heads of their layers, at least one, in order, none twice? n_head says which kind.
kvf_status kvf_check_heads(const std::vector<kvf_layer> & layers, int32_t n, const kvf_head * heads,
                           int32_t kvf_layer::*n_head);
