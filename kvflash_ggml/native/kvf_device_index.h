// The first index rows of each text on the device that computes the steps, and scores behind them.
#pragma once

#include "kvf_scores.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <vector>

struct kvf_lane;

struct kvf_device_index {
    const kvf_lane *        lane = nullptr;
    decltype(&kvf_scores)   scores = nullptr;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           rows    = nullptr;  // I8, bytes of index rows
    ggml_tensor *           asked   = nullptr;  // I8, a kvf_scores_unit of each KV head, then a kvf_scores_head of each head
    ggml_tensor *           queries = nullptr;  // I8, Q8_0 blocks of each column
    ggml_tensor *           out     = nullptr;  // F32, of all columns and chunks
    int32_t                 blocks  = 1;        // of a column
    int64_t                 heads_at = 0;       // where these begin
    std::vector<char>       known;              // what `asked` holds: most tokens ask the same heads
};
