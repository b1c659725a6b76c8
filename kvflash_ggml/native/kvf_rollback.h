// How far recurrent state can go back.
#pragma once

#include "kvf.h"

#include <string>

struct kvf_engine;
struct llama_context;
class llama_memory_recurrent;

// Why the rollback planes of a context cannot be used, or an empty string.
std::string kvf_planes_refusal(llama_context & ctx);

// Bytes of one state of all layers.
int64_t kvf_recurrent_bytes(const llama_memory_recurrent & memory);

// Tokens that can be taken back of a step that has just been computed.
int32_t kvf_step_reach(const kvf_engine & engine);
