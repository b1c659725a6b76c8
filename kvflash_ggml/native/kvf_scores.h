// Attention masses from an index on a device: what the library asks of a backend that has a kernel for it.
#pragma once

#include "ggml-backend.h"

#include <cstdint>

// The keys of one KV head in an index row, and the queries that read them: columns [first, first + count) of all.
struct kvf_scores_unit {
    int32_t offset;  // in a row, in bytes
    int32_t blocks;  // of a key, of 32 values each
    int32_t first;
    int32_t count;
    float   scale;
};

// The captured queries of a head: of so many floats, row after row of them so far apart, in floats.
struct kvf_scores_head {
    const float * queries;
    int64_t       apart;
    int64_t       values;
};

constexpr int32_t KVF_SCORES_MAX_BLOCKS = 32;  // a kernel keeps 64 keys in 48 KiB
constexpr int32_t KVF_SCORES_MAX_ROWS   = 64;

// Rows of captured queries, which are columns of each head in turn.
struct kvf_scores_rows {
    int32_t n;
    int32_t row[KVF_SCORES_MAX_ROWS];
};

// Pointers are of the backend's device. Of n index rows of `row_size` bytes, one behind the other, it writes to out [columns][n]
// the logarithm of the sum of exp(scale*q*k) over the KVF_BLOCK keys of each, behind what the backend computes and without
// waiting. most: queries of the unit that has the most of them. queries: room for `blocks` blocks of Q8_0 of each column, as
// many as the longest key has.
void kvf_scores(ggml_backend_t backend, const void * index, int64_t row_size, int32_t n, const kvf_scores_unit * units,
                int32_t n_units, int32_t most, const kvf_scores_head * heads, int32_t n_heads, const kvf_scores_rows & rows,
                void * queries, int32_t blocks, float * out);

constexpr const char * KVF_SCORES = "kvf_scores";  // what a backend calls it
