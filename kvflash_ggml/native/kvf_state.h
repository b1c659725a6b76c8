// The parts of a memory beside the pool.
#pragma once

#include "kvf.h"

#include <vector>

struct llama_memory_i;
class llama_io_read_i;
class llama_io_write_i;
class llama_kv_cache;
class llama_kv_cache_iswa;
class llama_memory_recurrent;

llama_kv_cache_iswa *    kvf_find_iswa(llama_memory_i * memory);       // null if there is none
llama_memory_recurrent * kvf_find_recurrent(llama_memory_i * memory);  // null if there is none

// Zero the recurrent state of a sequence, which another text is not to begin with. All compute is done.
void kvf_zero_state(kvf_engine & engine, int32_t seq);

// Zero K and V of the empty cells of a cache, and all that is not pooled and that no sequence has. All compute is done.
void kvf_zero_cells (llama_kv_cache & kv);
void kvf_zero_beside(kvf_engine & engine);

// Empty what is not pooled of a sequence.
void kvf_clear_state(kvf_engine & engine, int32_t seq);

// The state of a sequence, wherever it goes; throws what `io` does.
void kvf_write_state(kvf_engine & engine, int32_t seq, llama_io_write_i & io);

// In place of what is there, the state of `length` tokens that `io` has in `size` bytes. STATE if it does not fit, and this
// part is empty then.
kvf_status kvf_restore_state(kvf_engine & engine, int32_t seq, llama_io_read_i & io, size_t size, int32_t length);
