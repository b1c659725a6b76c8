// The parts of a memory beside the pool.
#pragma once

struct llama_memory_i;
class llama_kv_cache_iswa;
class llama_memory_recurrent;

llama_kv_cache_iswa *    kvf_find_iswa(llama_memory_i * memory);       // null if there is none
llama_memory_recurrent * kvf_find_recurrent(llama_memory_i * memory);  // null if there is none
