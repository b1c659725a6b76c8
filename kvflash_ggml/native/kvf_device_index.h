// The first index rows of each text on a device, beside the steps that it computes.
#pragma once

#include "kvf_scores.h"

#include "ggml-cpp.h"

#include <cstdint>
#include <mutex>

struct kvf_device_index {
    std::mutex              mutex;  // of all of it: each text has a thread that scores
    ggml_backend_ptr        queue;  // of its own, so that no score waits for a step
    decltype(&kvf_scores)   scores = nullptr;
    ggml_context_ptr        ctx;
    ggml_backend_buffer_ptr buffer;
    ggml_tensor *           rows  = nullptr;  // I8, bytes of index rows
    ggml_tensor *           asked = nullptr;  // I8, kvf_scores_unit of each KV head, and from `queries` on Q8_0 blocks of each column
    ggml_tensor *           out   = nullptr;  // F32, of all columns and some chunks
    int64_t                 queries = 0;
    ggml_backend_buffer_ptr host;             // page-locked: of what is asked, and behind it of what comes out
};
