// One device that holds pooled layers, and how bytes move between it and the host.
#pragma once

#include "kvf.h"

#include "ggml-cpp.h"

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

// Transfers run on a stream of their own, ordered against the compute by events.
struct kvf_lane {
    static constexpr uint64_t N_EVENTS = 64;

    ggml_backend_dev_t     dev     = nullptr;
    ggml_backend_t         compute = nullptr;  // belongs to the context
    ggml_backend_ptr       copy;               // null: transfers are plain copies
    bool                   remote = false;     // on a server: all that is sent to it is done in that order
    uint64_t               sound  = 0;         // of a server: it answered at least until this transfer was done
    ggml_backend_event_ptr compute_mark;
    std::array<ggml_backend_event_ptr, N_EVENTS> done;  // of transfer t, at t % N_EVENTS
    int32_t                n_layers = 0;

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

    ggml_gallocr_ptr rows;  // room for rows on their way between slots, null before the first of them
};

// kvf_lane.cpp
void           kvf_lanes_init(kvf_engine & engine);
ggml_backend_t kvf_compute_of(const kvf_engine & engine, const ggml_tensor * tensor);  // of the context, or null

// kvf_staging.cpp
std::unique_ptr<kvf_lane::staging> kvf_staging_init(const kvf_lane & lane, int32_t n_blocks);
void kvf_staging_page_in(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image);

// kvf_transfer.cpp: the order of transfers and compute
void     kvf_compute_waits(kvf_engine & engine, uint64_t ticket);
void     kvf_copies_wait(kvf_engine & engine);     // the copy streams continue after the compute submitted so far
uint64_t kvf_transfer_begin(kvf_engine & engine);  // so does this transfer
void     kvf_transfer_end(kvf_engine & engine, uint64_t ticket);
