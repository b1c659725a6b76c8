// One device that holds pooled layers, and how bytes move between it and the host.
#pragma once

#include "kvf.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <vector>

// The transfers of one device: of a share of every page image, the spans of its layers, which lie side by side.
struct kvf_lane {
    kvf_mode               mode    = KVF_MODE_HOST;
    ggml_backend_dev_t     dev     = nullptr;
    ggml_backend_t         compute = nullptr;  // belongs to the context; null: all of it must be waited for
    ggml_backend_ptr       copy;               // where transfers are submitted, null: they are plain copies
    ggml_backend_event_ptr compute_mark;       // with a stream: the compute that the next transfer comes after
    int32_t                first_layer = 0;    // among the pooled layers
    int32_t                n_layers    = 0;
    int64_t                share_offset = 0;   // in a page image
    int64_t                share_bytes  = 0;

    // one span of a page image: 64 rows of K or V of one layer
    struct span {
        ggml_tensor * tensor;
        size_t        offset;
        size_t        size;
    };
    std::vector<span> spans;

    // n spans of one size, at equal distances on the device and in an image
    struct group {
        span   first;
        size_t n           = 1;
        size_t apart       = 0;
        size_t image_apart = 0;
    };

    // Whole images arrive here in one copy each and are spread over the layers on the device, and are collected here before
    // they leave: a page is dozens of spans, too small one by one to fill the bus. Holds the share of each image.
    struct staging {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor *           pages = nullptr;  // I8  [share, n_pages]
        ggml_tensor *           index = nullptr;  // I32 [n_pages], the block of each page
        int64_t                 n_blocks = 0;
        std::vector<group>      groups;           // of all spans
    };
    std::unique_ptr<staging> stage;  // null: spans are copied one by one

    ggml_gallocr_ptr rows;  // room for rows on their way between slots, null before the first of them
};

// kvf_lane.cpp
void           kvf_lanes_init(kvf_engine & engine);
ggml_backend_t kvf_compute_of(const kvf_engine & engine, const ggml_tensor * tensor);  // of the context, or null
void           kvf_lane_follow(kvf_engine & engine, const kvf_lane & lane);  // what moves next comes after the compute so far
const kvf_lane * kvf_lane_beside(const kvf_engine & engine, const ggml_tensor * tensor);  // that copies it beside the compute, or null

// Bytes between host and device, on a lane's own device. n: so many pieces, `apart` bytes one from the next in both.
void kvf_lane_get(const kvf_lane & lane, const ggml_tensor * tensor, void * data, size_t offset, size_t size, size_t n = 1,
                  size_t apart = 0);
void kvf_lane_set(const kvf_lane & lane, ggml_tensor * tensor, const void * data, size_t offset, size_t size);

// kvf_staging.cpp. n <= KVF_STAGED_PAGES pages; `block` is read until the transfer is done.
constexpr int32_t KVF_STAGED_PAGES = 8;
void kvf_staging_init(kvf_lane & lane, int32_t n_blocks);  // `stage`, if the device can have one
void kvf_staging_page_in(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image);
void kvf_staging_page_out(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image);

// kvf_transfer.cpp
void kvf_copies_wait(kvf_engine & engine);  // what all lanes move next comes after the compute submitted so far
void kvf_images_wait(kvf_engine & engine, int32_t n, const uint64_t * image);  // until they can be sent to every device
