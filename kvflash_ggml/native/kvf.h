// The native seam: everything Python can ask of the engine. C++ executes one plan per step and decides nothing.
// All functions return 0 or a positive result on success and a KVF_E_* code on failure, unless said otherwise.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

#include <stddef.h>
#include <stdint.h>

// [cdef]
#define KVF_ABI        3
#define KVF_BLOCK      64

#define KVF_E_ARGUMENT -1
#define KVF_E_MEMORY   -2
#define KVF_E_REFUSED  -3
#define KVF_E_STATE    -4
#define KVF_E_DECODE   -5

typedef struct kvf_engine kvf_engine;

// What the pooled cache of a context looks like. Sizes are in bytes.
typedef struct kvf_info {
    int32_t n_slots;       // cells of the pool
    int32_t n_layers;      // layers whose KV cache is pooled
    int32_t n_pos;         // position values per token (4 with M-RoPE)
    int32_t n_swa;         // sliding window of the layers that are not pooled, 0 if there are none
    int32_t recurrent;     // 1 if the memory also holds recurrent state
    int32_t alibi;         // 1 if the mask carries distances
    int32_t mask_f32;      // 1: mask rows are float, 0: half precision
    int32_t v_trans;       // 1: V is stored transposed, so pages cannot move
    int32_t query_rows;    // query rows kept per layer, 0 if capture is off
    int32_t pinned;        // 1 if page images can live in page-locked memory
    int32_t async;         // 1 if transfers run beside the compute
    int32_t rotated;       // bit 0: keys are stored rotated, bit 1: values
    int64_t page_bytes;    // one page image: KVF_BLOCK rows of K, then of V, for every layer in order
    int64_t device_bytes;  // K and V of the whole pool, and the staging area of page-ins
    char    type_k[16];
    char    type_v[16];
    char    device[64];
} kvf_info;

// Where one pooled layer lives in a page image, and how its heads are shaped.
typedef struct kvf_layer {
    int32_t il;            // layer index in the model
    int32_t n_head;        // query heads
    int32_t n_head_kv;
    int32_t head_k;        // values per K head
    int32_t head_v;
    int32_t has_v;         // 0 if V is a view of K
    int64_t k_offset;      // first byte of K in a page image
    int64_t k_row;         // bytes of one K row (all heads)
    int64_t v_offset;
    int64_t v_row;
    float   scale;         // attention scores are scale*q*k; known once a graph with query capture has been built
} kvf_layer;

// One step: tokens, the slots they take, and who may see whom. All arrays belong to the caller.
typedef struct kvf_plan {
    int32_t         n_tokens;
    const int32_t * token;       // [n_tokens]
    const int32_t * pos;         // [n_tokens] logical positions
    const int32_t * slot;        // [n_tokens] distinct, each free
    const int8_t  * output;      // [n_tokens] 1: keep the logits of this token
    const void    * mask;        // [n_tokens][mask_stride] added to the attention scores
    int64_t         mask_stride; // values per mask row, at least n_slots
    uint64_t        wait;        // the compute starts after this transfer, 0: nothing to wait for
} kvf_plan;

int      kvf_abi(void);
int64_t  kvf_sizeof(int which);  // 0 llama_context_params, 1 llama_model_params, 2 llama_batch

// The next context created by this thread gets a pool of so many cells (0: stock behaviour) and keeps query_rows rows.
void     kvf_set_pool(uint32_t cells, uint32_t query_rows);

// Would a pool work for this model? Writes the bytes one slot takes, or the reason for a refusal.
int      kvf_probe(const void * model, int32_t type_k, int32_t type_v, int32_t offload,
                   int64_t * slot_bytes, char * why, size_t why_size);

// Free and total bytes of the device that holds the pool of this model.
int      kvf_device_memory(const void * model, int64_t * free_bytes, int64_t * total_bytes);

int      kvf_open(void * ctx, kvf_engine ** out, char * why, size_t why_size);
void     kvf_close(kvf_engine * engine);
void     kvf_get_info(const kvf_engine * engine, kvf_info * out);
int      kvf_get_layers(const kvf_engine * engine, kvf_layer * out, int32_t n);

// 0, or the code of llama_decode when positive, or KVF_E_*. After a failure no planned token is in the cache.
int      kvf_step(kvf_engine * engine, const kvf_plan * plan);
void     kvf_synchronize(kvf_engine * engine);
uint64_t kvf_decode_ns(const kvf_engine * engine);  // time spent inside llama_decode since kvf_open

// Transfers of whole blocks, in the order of submission, after all compute submitted before. Each returns a ticket.
uint64_t kvf_page_out(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image);
uint64_t kvf_page_in (kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image);
void     kvf_wait(kvf_engine * engine, uint64_t ticket);  // returns when that transfer is done

// What llama.cpp believes about slots [slot, slot + n): empty, or holding positions pos, pos + 1, ...
int      kvf_cells_clear(kvf_engine * engine, int32_t slot, int32_t n);
int      kvf_cells_set  (kvf_engine * engine, int32_t slot, int32_t n, int32_t pos, const int32_t * token);
int      kvf_cells_get  (const kvf_engine * engine, int32_t slot, int32_t n, int32_t * pos);

int      kvf_truncate(kvf_engine * engine, int32_t pos);  // 1: done, 0: this memory cannot, nothing changed
void     kvf_clear(kvf_engine * engine);
int32_t  kvf_swa_first(const kvf_engine * engine);        // oldest position in the sliding-window cache, -1: none

// The part of the memory that is not pooled: recurrent state, and sliding-window rings with every token in its place.
int64_t  kvf_state_size(kvf_engine * engine);
int64_t  kvf_state_get(kvf_engine * engine, uint8_t * out, int64_t size);
// The state of a text of `length` tokens. The data may be hostile: what does not fit is refused, and this part is empty then.
int      kvf_state_set(kvf_engine * engine, const uint8_t * data, int64_t size, int32_t length);

// Seconds that one plain copy of so many bytes takes between page-locked memory and the device, to compare with.
double   kvf_plain_copy(kvf_engine * engine, int64_t size, int to_device);

void *   kvf_host_alloc(kvf_engine * engine, int64_t size);
void     kvf_host_free(kvf_engine * engine, void * data);

// The newest queries of all layers, behind the compute submitted so far: a ticket. Per layer [query_rows][n_head][head_k]
// floats; the row of position p is row p % query_rows. The next step does not overwrite them before they are read.
uint64_t kvf_query_read(kvf_engine * engine, float * out);
int      kvf_query_write(kvf_engine * engine, const float * rows);  // put them back, all layers

// Make this row the logits of the last token, as if it had just been evaluated.
int      kvf_logits_set(kvf_engine * engine, const float * row, int32_t n_vocab);

// Scoring of chunks on the host. Queries are floats in the basis of the cached keys. These touch no device and may run on any
// thread beside a decode.

// A head of a pooled layer: a query head, or where units are asked for a KV head. Lists of them are in ascending order of
// (layer, head), without repetition.
typedef struct kvf_head {
    int32_t layer;         // among the pooled layers
    int32_t head;
} kvf_head;

// Index: the keys of some KV heads, the units, at 4 bits. The index row of a chunk holds for each unit in order the KVF_BLOCK
// keys of the chunk, in ggml's type Q4_0; a key whose length is not a multiple of 32 values is padded with zeros.
int64_t  kvf_index_size (const kvf_engine * engine, int32_t n_units, const kvf_head * units);  // bytes of an index row
int      kvf_index_build(const kvf_engine * engine, int32_t n_units, const kvf_head * units, const uint8_t * image,
                         uint8_t * out);
// Attention mass of n chunks for `rows` queries of each head: the logarithm of the sum of exp(scale*q*k) over the keys of a
// chunk. Queries are per head [rows][head_k], results per head [rows][n]. From the index rows at these addresses, whose units
// must include the KV head of every head, ...
int      kvf_index_score(const kvf_engine * engine, int32_t n_units, const kvf_head * units,
                         int32_t n_heads, const kvf_head * heads, int32_t n, const uint64_t * index,
                         int32_t rows, const float * queries, float * out, int32_t n_threads);
// ... or from the keys in the page images at these addresses.
int      kvf_keys_score (const kvf_engine * engine, int32_t n_heads, const kvf_head * heads, int32_t n, const uint64_t * image,
                         int32_t rows, const float * queries, float * out, int32_t n_threads);
// [/cdef]

#ifdef __cplusplus
}
#endif
