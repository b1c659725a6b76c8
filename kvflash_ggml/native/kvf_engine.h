// The engine of one context: its pooled cache, its devices, its transfers.
#pragma once

#include "kvf_pool.h"

#include "llama-context.h"

#include <array>
#include <memory>
#include <mutex>
#include <vector>

// One device that holds pooled layers. Transfers run on a stream of their own, ordered against the compute by events.
struct kvf_device {
    static constexpr uint64_t N_EVENTS = 64;

    ggml_backend_t     compute = nullptr;  // belongs to the context
    ggml_backend_ptr   copy;               // null: transfers are plain copies
    ggml_backend_event_ptr compute_mark;
    std::array<ggml_backend_event_ptr, N_EVENTS> done;  // of transfer t, at t % N_EVENTS

    // one span of a page image: 64 rows of K or V of one layer
    struct span {
        ggml_tensor * tensor;
        size_t        offset;
        size_t        size;
    };
    std::vector<span> spans;
};

struct kvf_engine {
    llama_context &  ctx;
    llama_memory_i & memory;
    llama_kv_cache & kv;
    kvf_pool &       pool;

    std::vector<kvf_layer>  layers;
    std::vector<kvf_device> devices;
    kvf_info                info {};

    uint64_t last_ticket  = 0;
    uint64_t last_page_in = 0;  // the next compute waits for it
    uint64_t decode_ns    = 0;

    std::vector<int32_t>        n_seq_id;  // batch fields that never change
    std::vector<llama_seq_id *> seq_id;

    std::mutex                           host_mutex;  // slabs are pinned by a background thread
    std::vector<ggml_backend_buffer_ptr> host;

    kvf_engine(llama_context & ctx, llama_memory_i & memory, llama_kv_cache & kv);
};

// kvf_transfer.cpp
void kvf_devices_open(kvf_engine & engine);
void kvf_compute_waits(kvf_engine & engine, uint64_t ticket);
