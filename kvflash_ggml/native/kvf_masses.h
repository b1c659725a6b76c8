// Attention mass of the chunks that a streamed step has in its stages, computed where the keys are while they are there.
#pragma once

#include "kvf_engine.h"

#include <string>
#include <vector>

struct kvf_stages;

struct kvf_masses {
    // Of the heads of one device. Memory is kept from one step to the next.
    struct part {
        ggml_context_ptr        ctx;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor *           index = nullptr;  // I32, per column the row of the captured queries, counted by heads
        ggml_tensor *           out   = nullptr;  // F32, per column the mass of each chunk
        ggml_gallocr_ptr        scratch;
        int64_t                 first = 0;        // of its columns, among all
        int64_t                 count = 0;
    };

    std::vector<part>    parts;    // by lane
    std::vector<int32_t> index;    // of all columns, which the devices read: heads, and for each of them rows
    int64_t              n_rows   = 0;
    int64_t              n_chunks = 0;
    int32_t              n_heads  = 0;  // that were asked for
    int32_t              n_done   = 0;  // that have been submitted
    std::string          why;           // there are no masses, empty: there are
};

// Is what a plan asks for possible?
kvf_status kvf_masses_check(const kvf_engine & engine, const kvf_plan & plan);

// Before a streamed step, behind the compute that was submitted so far.
void kvf_masses_begin(kvf_engine & engine, const kvf_plan & plan);

// The stage of a layer is complete, and its queries are captured: what follows on its device may overwrite both.
void kvf_masses_submit(kvf_engine & engine, const kvf_plan & plan, size_t layer);
