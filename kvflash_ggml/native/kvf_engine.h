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

    // Whole images arrive here in one copy each and are spread over the layers on the device: a page is dozens of spans, too
    // small one by one to fill the bus. Holds the bytes [first, first + size) of each image, which are those of this device.
    struct staging {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor *           pages = nullptr;  // I8  [size, n_pages]
        ggml_tensor *           index = nullptr;  // I64 [n_pages], the block of each page
        std::vector<ggml_tensor *> blocks;        // per span: its tensor seen as F32 [span, n_blocks]
        size_t                  first = 0;
    };
    std::unique_ptr<staging> stage;  // null: spans are copied one by one
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
    uint64_t compute_barrier = 0;  // the next compute waits for this transfer
    uint64_t decode_ns    = 0;

    std::vector<int32_t>        n_seq_id;  // batch fields that never change
    std::vector<llama_seq_id *> seq_id;

    std::mutex                           host_mutex;  // slabs are pinned by a background thread
    std::vector<ggml_backend_buffer_ptr> host;

    kvf_engine(llama_context & ctx, llama_memory_i & memory, llama_kv_cache & kv);
};

constexpr llama_seq_id KVF_SEQ = 0;  // a pool holds one sequence

std::vector<kvf_layer> kvf_layers(const kvf_engine * engine);  // with the scale of the newest graph

// kvf_state.cpp
class llama_kv_cache_iswa;
class llama_memory_recurrent;
llama_kv_cache_iswa *    kvf_find_iswa(llama_memory_i * memory);       // null if there is none
llama_memory_recurrent * kvf_find_recurrent(llama_memory_i * memory);  // null if there is none

// kvf_staging.cpp
std::unique_ptr<kvf_device::staging> kvf_staging_open(const kvf_device & device, int32_t n_blocks);
void kvf_staging_page_in(const kvf_device & device, int32_t n, const int32_t * block, const uint64_t * image);

// kvf_transfer.cpp
void kvf_devices_open(kvf_engine & engine);
void kvf_compute_waits(kvf_engine & engine, uint64_t ticket);
