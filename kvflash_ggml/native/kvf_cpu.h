// ggml's CPU backend, as it was loaded. A portable build has one library for each kind of CPU and loads one of them when it
// runs, so libllama links none: what is not in the backend's interface is looked up where the backend came from.
#pragma once

#include "ggml-cpu.h"

struct kvf_cpu {
    decltype(&ggml_get_type_traits_cpu) type_traits;
    decltype(&ggml_graph_plan)          graph_plan;
    decltype(&ggml_graph_compute)       graph_compute;
};

// Ends the process if there is no CPU backend: no model can be loaded without one.
const kvf_cpu & kvf_cpu_backend();
