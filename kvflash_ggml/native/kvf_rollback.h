// How far recurrent state can go back.
#pragma once

#include "kvf.h"

#include <string>
#include <vector>

struct kvf_engine;
struct llama_context;
class llama_memory_recurrent;

// Why the rollback planes of a context cannot be used, or an empty string.
std::string kvf_planes_refusal(llama_context & ctx);

// Bytes of one state of all layers.
int64_t kvf_recurrent_bytes(const llama_memory_recurrent & memory);

// Around llama_decode of a plan: how far each sequence can go back then. A step may move the states of others.
class kvf_reach {
public:
    kvf_reach(kvf_engine & engine, const kvf_plan & plan);

    void kept();      // nothing was computed
    void computed();
    void failed();    // in the midst

private:
    kvf_engine &         engine;
    std::vector<int32_t> before;   // [n_seq]
    std::vector<int32_t> tokens;   // [n_seq] of the plan
    std::vector<int32_t> places;   // [n_seq] of their states, -1 for none
    bool                 shared;   // rows of the plan can share a position, and llama.cpp counts planes by positions
};
