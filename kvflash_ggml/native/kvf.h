// The native seam: everything Python can ask of the engine. C++ executes one plan per step and decides nothing.
// What can fail returns a kvf_status, and its values through pointers that come last; kvf_last_error() tells why. A call that
// failed has changed nothing, unless its comment says what.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

#include <stddef.h>
#include <stdint.h>

// [cdef]
#define KVF_ABI   18
#define KVF_BLOCK 64

enum kvf_status {
    KVF_STATUS_SUCCESS     =  0,
    KVF_STATUS_ARGUMENT    = -1,  // a value that is out of its range, or does not fit the others
    KVF_STATUS_MEMORY      = -2,  // no memory
    KVF_STATUS_REFUSED     = -3,  // this model or this context cannot have a pool
    KVF_STATUS_STATE       = -4,  // bytes that are no state of this memory
    KVF_STATUS_DECODE      = -5,  // llama_decode failed, or computed what are no numbers
    KVF_STATUS_UNSUPPORTED = -6,  // has a place in this interface, but cannot be done here
    KVF_STATUS_LOST        = -7,  // a server does not answer any more; the reason is its endpoint
};

typedef struct kvf_engine kvf_engine;

// What the pooled cache of a context looks like. Sizes are in bytes.
typedef struct kvf_info {
    int32_t n_slots;       // cells of the pool
    int32_t n_layers;      // layers whose KV cache is pooled
    int32_t n_devices;     // devices that hold them
    int32_t n_seq;         // sequences: 0 .. n_seq - 1 can be named
    int32_t n_pos;         // position values per token (4 with M-RoPE)
    int32_t n_embd;        // values of a row that is given as embedding
    int32_t n_swa;         // sliding window of the layers that are not pooled, 0 if there are none
    int32_t recurrent;     // 1 if the memory also holds recurrent state
    int32_t rs_planes;     // earlier states that it keeps of a step's last tokens, 0 if it cannot go back
    int32_t alibi;         // 1 if the mask carries distances
    int32_t mask_f32;      // 1: mask rows are float, 0: half precision
    int32_t v_trans;       // 1: V is stored transposed, so pages cannot move
    int32_t branches;      // 1 if tokens of a step can be siblings, of one position: see kvf_plan
    int32_t windows_mutual;// 1 if tokens of a mutual step see each other in sliding windows only, and not in the pool
    int32_t query_rows;    // rows that a layer has for captured queries, 0 if capture is off
    int32_t rotated;       // bit 0: keys are stored rotated, bit 1: values
    int32_t host_compute;  // 1 if weights beside the embedding are in host memory, so that the CPU has a part in every step
    int32_t n_threads;     // that the CPU computes a token with
    int64_t page_bytes;    // one page image: KVF_BLOCK rows of K, then of V, for every layer in order
    int64_t device_bytes;  // K and V of the whole pool, and the staging area of page-ins
    int64_t step_work;     // see kvf_model_work
    char    type_k[16];
    char    type_v[16];
} kvf_info;

// How pages move between a device and the host.
enum kvf_mode {
    KVF_MODE_STREAM = 0,  // on a stream of their own, ordered against the compute by events
    KVF_MODE_REMOTE = 1,  // in one queue with the compute
    KVF_MODE_SYNC   = 2,  // by plain copies, when the compute is done
    KVF_MODE_HOST   = 3,  // by plain copies in host memory, for which nothing must be waited
};

enum kvf_device_kind {
    KVF_DEVICE_CPU        = 0,
    KVF_DEVICE_GPU        = 1,  // or one behind a network
    KVF_DEVICE_INTEGRATED = 2,  // a GPU that shares the host's memory
    KVF_DEVICE_OTHER      = 3,  // computes beside the CPU, and has no memory
};

// A device, and what of the pool it holds: 0 where no engine is asked.
typedef struct kvf_device {
    char    name[64];
    char    description[128];
    char    backend[16];   // CPU, CUDA, RPC, ...
    char    id[32];        // of the hardware, empty if it is not known
    int32_t kind;          // a kvf_device_kind
    int32_t pinned;        // 1 if it can copy from and to page-locked memory
    int32_t asynchronous;  // 1 if it computes beside the host
    int64_t free_bytes;    // now
    int64_t total_bytes;
    int32_t mode;          // a kvf_mode
    int32_t first_layer;   // among the pooled layers
    int32_t n_layers;
    int64_t share_offset;  // its layers lie side by side in a page image: the first byte of them
    int64_t share_bytes;   // and how many; one slot takes a KVF_BLOCKth of it
    int64_t staging_bytes; // where pages arrive
    int64_t query_bytes;   // captured queries
    int64_t largest_bytes; // of the largest tensor that it computes on, 0 where nothing bounds it
} kvf_device;

// Where one pooled layer lives in a page image, and how its heads are shaped.
typedef struct kvf_layer {
    int32_t il;            // layer index in the model
    int32_t device;        // index of the device that holds it
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

// A head of a pooled layer: a query head, or where units are asked for a KV head. Lists of them are in ascending order of
// (layer, head), without repetition.
typedef struct kvf_head {
    int32_t layer;         // among the pooled layers
    int32_t head;
} kvf_head;

// One step: tokens, the slots they take, and who may see whom. All arrays belong to the caller. A context that was made for
// several sequences takes tokens of any of them in one step; each has its own positions. Where a model has recurrent state, the
// step has equally many tokens of each, and n_ubatch at most.
//
// Siblings of a tree have the same sequence and position, each a slot of its own, and mask rows that open a token's ancestors
// only. They are refused where memory beside the pool would mix them up: a sliding window, recurrent state, n-gram inputs; and
// in a step with tokens of several sequences.
typedef struct kvf_plan {
    int32_t          n_tokens;
    const int32_t  * token;       // [n_tokens]
    const float    * embd;        // [n_tokens][n_embd] in place of `token`, of media; null where these are tokens
    const int32_t  * seq;         // [n_tokens] below n_seq
    const int32_t  * pos;         // [n_tokens] logical positions, never decreasing within a sequence. Of media [n_pos][n_tokens]:
                                  // the first of the n_pos values is this position, which rows of one image can share
    const int32_t  * slot;        // [n_tokens] distinct, each free
    const int8_t   * output;      // [n_tokens] 1: keep the logits of this token
    const int32_t  * query_row;   // [n_tokens] the row that takes the query of this token: distinct, or -1 for none
    const void     * mask;        // [n_tokens][mask_stride] added to the attention scores
    int64_t          mask_stride; // values per mask row, at least n_slots
    int32_t          mutual;      // 1: media whose rows see each other, n_ubatch at most; the mask says it of the pool
    uint64_t         wait;        // the compute starts after this transfer, 0: nothing to wait for
    int32_t          fixed_view;  // 0: of a context for several sequences the step attends to the slots between the first and
                                  // the last that its sequences have. 1: to as many slots whatever its sequences are

    // A streamed step attends through the stages instead of the pool: to chunks in page images, then to the first rows of a
    // block, then to its own tokens, one row of a stage each. Its own rows go to their slots all the same.
    int32_t          n_streamed;  // chunks, 0: the step attends to the pool, and the rest of this plan means nothing
    const uint64_t * streamed;    // [n_streamed] addresses of their page images, see kvf_streamed_ticket
    int32_t          open_rows;   // below KVF_BLOCK
    int32_t          open_block;
    int32_t          mask_first;  // the mask covers the rows of a stage from here on; those before are visible to every token.
                                  // 0, or KVF_BLOCK*n_streamed; rounded up to 256 there are so many rows as are attended to

    // What a streamed step computes on its way, from the keys in the stages: the attention mass, see kvf_index_score, of its
    // chunks, those with its last tokens among them, for captured queries. It is had by kvf_masses_read.
    int32_t          n_mass_heads; // 0: nothing of it
    const kvf_head * mass_heads;   // [n_mass_heads] query heads
    int32_t          n_mass_rows;
    const int32_t  * mass_row;     // [n_mass_rows] rows of captured queries
} kvf_plan;

int             kvf_abi(void);
int64_t         kvf_sizeof(int which);  // 0 llama_context_params, 1 llama_model_params, 2 llama_batch; 0 for any other

// Why the last call of this thread that failed did.
const char *    kvf_last_error(void);

// Why libmtmd has refused a projector, or an image, on this thread; "" if it has not since this was asked.
const char *    kvf_guard_reason(void);

// The next context made by this thread gets a pool of so many cells (0: stock behaviour) and keeps query_rows queries.
void            kvf_set_pool(uint32_t cells, uint32_t query_rows);

// Would a pool work for this model? The bytes that one slot takes of each device, in the order of the model and the host
// last (kvf_model_n_devices), or REFUSED; ARGUMENT if no cache of the model can have these types.
enum kvf_status kvf_probe(const void * model, int32_t type_k, int32_t type_v, int32_t offload, int64_t * slot_bytes, int32_t n);

// Bytes that each of rs_planes would take for this model, 0 if there can be none: llama_context_params.n_rs_seq asks for them.
int64_t         kvf_plane_bytes(const void * model);

// What things would take, told before they are made. Lists of devices are in the order of the model, and the host comes last.

// What lies on one device. Sizes are in bytes.
typedef struct kvf_need {
    char    device[64];
    int64_t model;         // weights
    int64_t context;       // K, V and recurrent state
    int64_t compute;       // buffers of the largest step
    int64_t queries;       // captured ones
} kvf_need;

// The memory of one layer of a model.
typedef struct kvf_layer_need {
    int32_t device;        // index of the one that holds it
    int32_t k_values;      // of one token, over all heads; 0 without a cache of its own
    int32_t v_values;
    int32_t cells;         // of a cache that is not pooled, as that of a sliding window; 0 if it is
    int64_t state;         // bytes of recurrent state, rollback planes with it
    int64_t query;         // bytes of one captured query, 0 if the layer is not pooled
    int32_t n_head;        // query heads, 0 if the layer is not pooled
    int32_t n_head_kv;     // that they read
} kvf_layer_need;

// A weight.
typedef struct kvf_weight {
    char    name[128];
    int64_t size;          // bytes that it takes of its buffer
    int32_t layer;         // or -1
    int32_t kind;          // 0 dense, 1 routed experts, 2 token embedding, 3 output
    int32_t device;
} kvf_weight;

// Load a model without its data: its weights have places and sizes, and none is read. ARGUMENT if the file is no model.
enum kvf_status kvf_sketch_init(const char * path, const void * model_params, void ** model);
void            kvf_sketch_free(void * model);

// Of a model, loaded with its data or without.
int32_t         kvf_model_n_devices(const void * model);  // with the host
enum kvf_status kvf_model_devices  (const void * model, kvf_device * out, int32_t n);  // without it, so that n is one less
int32_t         kvf_model_n_layers (const void * model);
int32_t         kvf_model_n_weights(const void * model);
enum kvf_status kvf_model_weights  (const void * model, kvf_weight * out, int32_t n);
int64_t         kvf_model_work     (const void * model);  // multiplications with weights that a step of one token makes

// What a context of this model would take, with a pool of so many cells (a multiple of 256; 0: stock) that keeps query_rows
// queries. Nothing of it is made, but for the model's devices themselves. No other call may use the model meanwhile, and no
// request of kvf_set_pool() is left. REFUSED if the model cannot have a pool, or so many sequences in one; ARGUMENT if there
// can be no such context.
enum kvf_status kvf_measure(void * model, const void * context_params, uint32_t cells, uint32_t query_rows,
                            kvf_need * needs, int32_t n_devices, kvf_layer_need * layers, int32_t n_layers);

// What a context that has been made takes, with its model.
enum kvf_status kvf_context_needs(const void * ctx, kvf_need * needs, int32_t n_devices);

// All devices that there are, in ggml's order.
int32_t         kvf_device_count(void);
enum kvf_status kvf_list_devices(kvf_device * devices, int32_t n);  // n is kvf_device_count
int64_t         kvf_largest_tensor(const char * device);  // bytes that it computes on as one, 0 for no bound or no such device

// For llama_model_params: `devices`, and `tensor_buft_overrides`, where the first pattern that is found in a tensor's name says
// where that goes. Names are those of devices. ARGUMENT for one that is unknown, or a pattern that is no regular expression.
enum kvf_status kvf_device_list(int32_t n, const char * const * name, void ** list);
enum kvf_status kvf_overrides  (int32_t n, const char * const * pattern, const char * const * device, void ** list);
void            kvf_list_free  (void * list);  // when the model has been loaded
int             kvf_finds      (const char * pattern, const char * name);  // as the loader does it

// REFUSED for a context that cannot have a pool. n_seq_max above 1 needs kv_unified and flash attention, and n_ctx
// has the sliding windows of all of them, and a step. Recurrent state beside a sliding window, and n-gram inputs, are kept for
// one sequence.
enum kvf_status kvf_engine_init(void * ctx, kvf_engine ** engine);
void            kvf_engine_free(kvf_engine * engine);
void            kvf_get_info   (const kvf_engine * engine, kvf_info * info);
enum kvf_status kvf_get_devices(const kvf_engine * engine, kvf_device * devices, int32_t n);  // n is n_devices, in layer order
enum kvf_status kvf_get_layers (const kvf_engine * engine, kvf_layer * layers, int32_t n);    // n is n_layers

// Stages for streamed steps of up to n_tokens tokens over n_slots, a multiple of 256, and the memory to compute these; stages
// that were there are freed. MEMORY, or UNSUPPORTED if a layer attends in a way of its own: there are none then. They serve
// one sequence at a time: all tokens of a streamed step are of one.
enum kvf_status kvf_stage_init(kvf_engine * engine, int32_t n_slots, int32_t n_tokens, int64_t * device_bytes);
uint64_t        kvf_streamed_ticket(const kvf_engine * engine);  // the newest streamed step has read its page images then
uint64_t        kvf_streamed_bytes(const kvf_engine * engine);  // copied from page images to stages so far
int64_t         kvf_masses_bytes(const kvf_engine * engine, int32_t device);  // that attention masses take there by now

// After a failure no planned token is in the cache. After DECODE recurrent state may have gone on, and queries been captured.
enum kvf_status kvf_step(kvf_engine * engine, const kvf_plan * plan);
void            kvf_synchronize(kvf_engine * engine);
uint64_t        kvf_decode_ns(const kvf_engine * engine);  // time spent inside llama_decode since kvf_engine_init

// Transfers of whole blocks, in the order of submission, after all compute submitted before.
enum kvf_status kvf_page_out(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image, uint64_t * ticket);
enum kvf_status kvf_page_in (kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image, uint64_t * ticket);
void            kvf_wait(kvf_engine * engine, uint64_t ticket);  // returns when that transfer is done

// 1 unless a server was lost before that transfer was done: what it has read is void then. Waits for servers only.
int             kvf_sound(kvf_engine * engine, uint64_t ticket);

// LOST if a server that computes for this context has left a message without an answer: for good, and what is read of its
// devices is zeros. A step asks this before and after; a state that is read is refused then.
enum kvf_status kvf_check_lost(const kvf_engine * engine);

// What llama.cpp believes about slots [slot, slot + n): empty, or holding these n positions of a sequence.
enum kvf_status kvf_cells_clear(kvf_engine * engine, int32_t slot, int32_t n);
enum kvf_status kvf_cells_set  (kvf_engine * engine, int32_t seq, int32_t slot, int32_t n, const int32_t * pos,
                               const int32_t * token);
enum kvf_status kvf_cells_get  (const kvf_engine * engine, int32_t slot, int32_t n, int32_t * pos);

// Zero what no sequence has: empty slots of the pool and of sliding windows, recurrent state of empty cells with its rollback
// copies, and stages. A kernel may multiply a hidden row with 0, and 0 times NaN is NaN: so nothing that is not finite may stay
// where a step can read it. Waits for the compute and all transfers.
void            kvf_zero_unused (kvf_engine * engine);

// Move K and V of n slots to n others, bit for bit, and what llama.cpp believes about them: the accepted path of a tree goes to
// its place. All rows are read before one is written, so a slot may be left by one and taken by another. In the order of
// transfers, and the next step waits for it.
enum kvf_status kvf_settle(kvf_engine * engine, int32_t n, const int32_t * from, const int32_t * to);

// Of one sequence: forget positions >= pos. A memory may be unable to go back: nothing has changed then, and done is 0. So may a
// sliding window of several sequences, whose others have taken what a token at `pos` would see.
//
// Recurrent state goes back as a whole, or once after each step: by less than the tokens that its last ubatch had, and by
// at most rs_planes. After a state was set, or a step failed in the midst, it cannot go back at all; nor may it after a step of
// other sequences, which has moved it. Should that fail in the midst, the state is gone.
enum kvf_status kvf_truncate    (kvf_engine * engine, int32_t seq, int32_t pos, int32_t * done);
enum kvf_status kvf_can_truncate(const kvf_engine * engine, int32_t seq, int32_t pos, int32_t * can);
enum kvf_status kvf_clear       (kvf_engine * engine, int32_t seq);  // with K and V, in a context of one sequence
enum kvf_status kvf_swa_first   (const kvf_engine * engine, int32_t seq, int32_t * pos);  // oldest position in the window, or -1

// The part of a sequence's memory that is not pooled: recurrent state, and sliding-window rings with every token in its place.
enum kvf_status kvf_state_size(kvf_engine * engine, int32_t seq, int64_t * size);
// Exactly that size. With a `ticket`, `out` is page-locked, and written behind the compute where the devices can do that; the next
// step waits for it.
enum kvf_status kvf_state_get (kvf_engine * engine, int32_t seq, uint8_t * out, int64_t size, uint64_t * ticket);
// The state of a text of `length` tokens. The data may be hostile: STATE if it does not fit, and this part is empty then. It may be
// on its way to the host: all transfers are done before it is read.
enum kvf_status kvf_state_set (kvf_engine * engine, int32_t seq, const uint8_t * data, int64_t size, int32_t length);

// As get and set do, but on the devices, and without waiting: behind the compute submitted so far, before what comes next. One
// state of each sequence is kept, as often as it is put back, until the next one is; in memory that is made when more of it is
// needed, and freed with the engine. After MEMORY none of it is kept.
enum kvf_status kvf_state_keep(kvf_engine * engine, int32_t seq);
enum kvf_status kvf_state_put (kvf_engine * engine, int32_t seq, int32_t length);  // STATE as above, or if none is kept

enum kvf_status kvf_host_alloc(kvf_engine * engine, int64_t size, void ** data);  // or MEMORY
void            kvf_host_free (kvf_engine * engine, void * data);

// The captured queries of all layers: per layer [query_rows + 1][n_head][head_k] floats, of which the last row means nothing. A
// plan names the row of each token, so what is where is the caller's to know. To verify drafts, ask for so many rows more than
// are looked at, and give the drafts rows that hold no query that is still wanted: the row of an accepted draft then counts,
// that of a rejected one is given away again, and nothing has been overwritten or need be copied.
//
// Read behind the compute submitted so far; the next step does not overwrite the rows before they are read. Of `out`, which has
// room for all of them, these n rows of each layer are written at least.
enum kvf_status kvf_query_read (kvf_engine * engine, int32_t n, const int32_t * row, float * out, uint64_t * ticket);
enum kvf_status kvf_query_write(kvf_engine * engine, const float * rows);  // put them back, all layers

// What the newest streamed step was asked for by mass_heads: per head [n_mass_rows][n] for the n whole chunks in its stages.
// Behind the compute submitted so far. UNSUPPORTED, with the reason, if it could not be computed beside the step; ARGUMENT for
// another size than that of all values.
enum kvf_status kvf_masses_read(kvf_engine * engine, float * out, int64_t size, uint64_t * ticket);

// Make this row the logits of the last token, as if it had just been evaluated.
enum kvf_status kvf_logits_set(kvf_engine * engine, const float * row, int32_t n_vocab);

// The k likeliest tokens of rows of the newest step, of any llama_context: id [n][k], best first, equal ones in their order; and
// their log-probabilities, logp [n][k], unless that is null, which is faster. A row is named as for llama_get_logits_ith: by
// its token in the batch, or -1 for the last one kept. Waits for the compute. ARGUMENT if a row was not kept; DECODE if it is
// not finite: a token may be impossible (-INFINITY), not all of them. id and logp then mean nothing.
enum kvf_status kvf_logits_top(void * ctx, int32_t n, const int32_t * row, int32_t k, int32_t * id, float * logp);

// For drafters: keep the inputs of these layers for every token of a step, and the state in front of the head if nextn is 1.
// Once, before the first step. UNSUPPORTED if the architecture does not hand them out.
enum kvf_status kvf_features_open(kvf_engine * engine, int32_t n_layers, const int32_t * layer, int32_t nextn, int32_t * width);
// Of n tokens of the last step, [n][width]: layer by layer, then the state. Waits for the compute; there are none after a step
// that failed, or when logits were put back.
enum kvf_status kvf_features_read(kvf_engine * engine, int32_t first, int32_t n, float * out);

// Was the model loaded with a head for further tokens? Without one a context of that kind ends the process.
int             kvf_draft_head(const void * model);

// A drafter's context: stock llama.cpp, sequence 0, without a pool. Tell it once whether the state in front of its head is
// wanted: 0 no, 1 of tokens with an output, 2 of all; and whether tokens see what follows them.
enum kvf_status kvf_draft_open(void * ctx, int32_t nextn, int32_t causal);

// Tokens, rows of `width` values, or both, at these positions. The last n_outputs of them have an output: all or none, unless
// it is a model that reads a text by itself, since the graphs of others do not pick rows.
enum kvf_status kvf_draft_run (void * ctx, int32_t encode, int32_t n, const int32_t * token, const float * rows, int32_t width,
                               const int32_t * pos, int32_t n_outputs);
// The states of the first n tokens of the last run, [n][width].
enum kvf_status kvf_draft_states(void * ctx, int32_t n, int32_t width, float * out);

// Scoring of chunks on the host. Queries are floats in the basis of the cached keys. These touch no device and may run on any
// thread beside a decode.

// The keys of one KV head in a page image, as floats: [KVF_BLOCK][head_k].
enum kvf_status kvf_keys_read  (const kvf_engine * engine, const kvf_head * unit, const uint8_t * image, float * out);

// Index: the keys of some KV heads, the units, at 4 bits. The index row of a chunk holds for each unit in order the KVF_BLOCK
// keys of the chunk, in ggml's type Q4_0; a key whose length is not a multiple of 32 values is padded with zeros.
enum kvf_status kvf_index_size (const kvf_engine * engine, int32_t n_units, const kvf_head * units, int64_t * size);
enum kvf_status kvf_index_build(const kvf_engine * engine, int32_t n_units, const kvf_head * units, const uint8_t * image,
                                uint8_t * out);
// Attention mass of n chunks for `rows` queries of each head: the logarithm of the sum of exp(scale*q*k) over the keys of a
// chunk. Queries are per head [rows][head_k], results per head [rows][n]. From the index rows at these addresses, whose units
// must include the KV head of every head, ...
enum kvf_status kvf_index_score(const kvf_engine * engine, int32_t n_units, const kvf_head * units,
                                int32_t n_heads, const kvf_head * heads, int32_t n, const uint64_t * index,
                                int32_t rows, const float * queries, float * out, int32_t n_threads);
// ... or from the keys in the page images at these addresses.
enum kvf_status kvf_keys_score (const kvf_engine * engine, int32_t n_heads, const kvf_head * heads, int32_t n,
                                const uint64_t * image, int32_t rows, const float * queries, float * out, int32_t n_threads);

// Scoring on the device that holds all of the pool, from index rows that lie there, in its turn behind the steps.

#define KVF_INDEX_SCORES 1048576  // results of one call, at most
#define KVF_INDEX_ROWS   64       // queries of a head in one call, at most

// Room for `size` bytes of index rows on the device, once, before others of these are called. UNSUPPORTED if it has no kernel
// for it, MEMORY if there is no room.
enum kvf_status kvf_index_open (kvf_engine * engine, int64_t size, int64_t * device_bytes);
// Copy the index rows at these addresses there, one behind the other: beside the steps, and on any thread. No score that has
// not ended may read what was there.
enum kvf_status kvf_index_put  (kvf_engine * engine, int64_t offset, int32_t n, const uint64_t * row, int64_t size);
// As kvf_index_score, from the n index rows at `offset`, a multiple of 16, for the captured queries in these rows.
// `out` is there when a transfer that begins behind the compute, such as kvf_query_read, is done.
enum kvf_status kvf_index_score_there(kvf_engine * engine, int32_t n_units, const kvf_head * units, int32_t n_heads,
                                      const kvf_head * heads, int32_t n, int64_t offset, int32_t rows, const int32_t * row,
                                      float * out);

// The CPU. A portable build has a backend for each kind of CPU, and loads one of them.

// The file that the CPU backend was loaded from, null before that.
const char *    kvf_cpu_library(void);

// Weights in the CPU's extra buffer types, which pack them for its kernels, against plain ones: for every weight type such a
// buffer takes, products with 1, 4 and 32 tokens. DECODE if one is off; a wrong build may also end the process.
const char *    kvf_selfcheck_name(int32_t buffer);  // of an extra buffer type, counted from 0; null after the last
enum kvf_status kvf_selfcheck(int32_t buffer, int32_t * n_types);  // how many weight types it takes

// For benchmarks only.

// Seconds that one plain copy of so many bytes takes between page-locked memory and a device of the pool.
enum kvf_status kvf_bench_copy(kvf_engine * engine, int32_t device, int64_t size, int32_t to_device, double * seconds);

// Servers of ggml's RPC backend, by "address:port" in numbers. Nobody but who asks for their devices gets them.

// Connect, and stay connected until close has been called as often; LOST if it does not answer, or an earlier connection that is
// still in use is lost; UNSUPPORTED if the library was built without that backend.
enum kvf_status kvf_rpc_open (const char * endpoint);
void            kvf_rpc_close(const char * endpoint);
int             kvf_rpc_state(const char * endpoint);  // -1 not connected, 0 it answers, 1 lost

// The first n devices of an open server, whose names kvf_device_list and kvf_overrides know. Returns how many there are.
int32_t         kvf_rpc_devices(const char * endpoint, kvf_device * devices, int32_t n);

// Of a device of an open server: the median of 100 round trips, and how long `size` bytes take there and back, in seconds.
enum kvf_status kvf_rpc_measure(const char * device, int64_t size, double * round_trip, double * sent, double * received);
// Attend to keys of this ggml type, and write a row of them. A server ends where it cannot: LOST.
enum kvf_status kvf_rpc_try(const char * device, int32_t type);

// Serve these devices of this machine, by name, to one client after the other. Returns only if it cannot listen there: LOST.
enum kvf_status kvf_rpc_serve(const char * endpoint, int32_t n_threads, const char * cache, int32_t n,
                              const char * const * device);
// [/cdef]

#ifdef __cplusplus
}
#endif
