// Attention over more chunks than the pool holds: K and V of one layer at a time lie in a stage, which is filled from page
// images while the layer before it is computed.
#pragma once

#include "kvf_masses.h"

#include <array>
#include <vector>

constexpr int64_t KVF_STAGE_PAD = 256;  // llama.cpp lets attention read a multiple of so many rows

struct kvf_stages {
    struct layer {
        ggml_tensor * k       = nullptr;  // as in the cache, with n_slots rows; layers of a ring share their memory in turn
        ggml_tensor * v       = nullptr;  // null if V is a view of K
        ggml_tensor * index   = nullptr;  // I64 [n_tokens], where the rows of the running step go
        size_t        ring    = 0;
        size_t        place   = 0;        // in its ring
        int           readers = 0;        // attention nodes of the newest graph that read it
        int           read    = 0;        // those that the running step has computed
    };

    // Layers of one shape on one device. Two stages hold them in turn; one where transfers are plain copies.
    struct ring {
        const kvf_lane *                      lane;
        std::vector<size_t>                   layers;  // among the pooled layers, in the order of the graph
        size_t                                n_stages;
        std::array<ggml_backend_event_ptr, 2> ready;   // of each stage, null where transfers are plain copies
        ggml_context_ptr                      ctx;
        ggml_backend_buffer_ptr               buffer;
    };

    // Images side by side on the host, and their first row in a stage.
    struct run {
        const uint8_t * image;
        int32_t         n;
        int64_t         row;
    };

    const int64_t       n_slots;
    const int64_t       n_tokens;  // of a step, at most
    std::vector<layer>  layers;    // of the cache, in its order
    std::vector<ring>   rings;
    int64_t             device_bytes = 0;
    uint64_t            bytes        = 0;  // copied from page images so far
    uint64_t            ticket       = 0;  // the transfers of the newest streamed step

    // Is the compute buffer that of the largest streamed step? Another kind of step makes it its own, and each longer text
    // would then have it made again.
    bool reserved = false;

    // of the running step
    bool                 active = false;
    const kvf_plan *     plan   = nullptr;  // null while memory is reserved
    int64_t              n_kv   = 0;        // rows of a stage that attention reads
    int64_t              first  = 0;        // of which the plan's mask covers those from here on
    std::vector<run>     runs;
    std::vector<int64_t> rows;              // [n_tokens] where each token's row goes
    std::pair<ggml_backend_sched_eval_callback, void *> callback;  // the context's own

    kvf_masses masses;  // of the newest step

    // of the newest graph
    ggml_tensor * mask      = nullptr;  // F16 [n_kv, n_tokens]
    ggml_tensor * mask_tail = nullptr;  // F32 [(n_kv - first)/2, n_tokens], the bits of its last columns: an input

    kvf_stages(const kvf_engine & engine, int64_t n_slots, int64_t n_tokens);
};

// The layer whose stage an attention node reads, or null.
kvf_stages::layer * kvf_attended(kvf_stages & stages, const ggml_tensor * node);

// Make room to compute the largest streamed step.
kvf_status kvf_stages_reserve(kvf_engine & engine);

// Rows that attention reads under a mask must be finite. All compute and all transfers are done.
void kvf_stages_zero(const kvf_stages & stages);

// Around llama_decode of a plan that streams.
kvf_status kvf_stream_check(const kvf_engine & engine, const kvf_plan & plan);
void       kvf_stream_begin(kvf_engine & engine, const kvf_plan & plan);
kvf_status kvf_stream_end  (kvf_engine & engine, kvf_status status);
