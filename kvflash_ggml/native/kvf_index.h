// What scores on the host and on a device have in common: where keys lie in an index row, and who asks for them.
#pragma once

#include "kvf.h"

#include "ggml.h"

#include <cstdint>
#include <vector>

constexpr ggml_type KVF_INDEX_TYPE = GGML_TYPE_Q4_0;

// Where the keys of one KV head lie in the record of a chunk, which is an index row or a page image. Sizes are in bytes.
struct kvf_key_rows {
    kvf_head  unit;
    float     scale;
    int64_t   head_k;
    int64_t   width;   // values of a row: head_k, or whole blocks
    ggml_type type;
    size_t    offset;
    size_t    stride;
};

// All query heads that read one KV head, one behind the other: columns [first, first + count) of the result.
struct kvf_column_group {
    const kvf_key_rows * keys;
    int64_t              first;
    int64_t              count;
};

// Can these heads ask for n chunks, with so many queries each, of an index of these units?
kvf_status kvf_check_index(const std::vector<kvf_layer> & layers, int32_t n_units, const kvf_head * units, int32_t n_heads,
                           const kvf_head * heads, int32_t n, int32_t rows);

std::vector<kvf_key_rows> kvf_rows_of_index(const std::vector<kvf_layer> & layers, int32_t n_units, const kvf_head * units);

// Empty if the keys of a head are not among `keys`.
std::vector<kvf_column_group> kvf_group_columns(const std::vector<kvf_layer> & layers, const std::vector<kvf_key_rows> & keys,
                                                int32_t n_heads, const kvf_head * heads, int32_t rows);
