#include "kvf_cpu.h"

#include "ggml-backend.h"
#include "kvf.h"

#include <dlfcn.h>

namespace {

// The library that the CPU backend came from, null if there is none.
const char * library() {
    auto * reg = ggml_backend_reg_by_name("CPU");
    Dl_info info {};
    // any function of it will do
    return reg && dladdr(ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"), &info) ? info.dli_fname : nullptr;
}

template <typename F>
void look_up(void * handle, const char * name, F & out) {
    out = reinterpret_cast<F>(dlsym(handle, name));
    GGML_ASSERT(out && "a symbol of ggml's CPU backend is missing");
}

kvf_cpu load() {
    const char * path = library();
    GGML_ASSERT(path && "no CPU backend is loaded");
    auto * handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // never closed: the functions are used to the end
    GGML_ASSERT(handle && "the CPU backend cannot be opened again");
    kvf_cpu res;
    look_up(handle, "ggml_get_type_traits_cpu", res.type_traits);
    look_up(handle, "ggml_graph_plan", res.graph_plan);
    look_up(handle, "ggml_graph_compute", res.graph_compute);
    return res;
}

}  // namespace

const kvf_cpu & kvf_cpu_backend() {
    static const kvf_cpu cpu = load();
    return cpu;
}

const char * kvf_cpu_library(void) {
    return library();
}
