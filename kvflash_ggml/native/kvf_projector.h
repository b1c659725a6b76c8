// What libmtmd asks before it hands a stranger's tensors to ggml. What is wrong throws std::runtime_error, which its own
// calls catch.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"

// While one lives, an assertion of ggml on this thread throws too. Nothing may be computed meanwhile, since threads of a step
// would wait for the one that has left. kvf_guard_reason() tells what was thrown last.
struct kvf_guard {
    kvf_guard() { begin(); }
    ~kvf_guard() { end(); }
    kvf_guard(const kvf_guard &)             = delete;
    kvf_guard & operator=(const kvf_guard &) = delete;

    void begin();
    void end();

  private:
    bool on = false;
};

// Note why a projector is refused, for kvf_guard_reason().
void kvf_refuse(const char * reason);

// Throw: an operation lacks a tensor beside another one, null for none; or a tensor with a name is missing.
[[noreturn]] void kvf_missing_beside(const char * operation, const ggml_tensor * other);
[[noreturn]] void kvf_missing(const char * name);

// A tensor that a file may lack, and whose shape a graph looks at.
class kvf_tensor {
  public:
    explicit kvf_tensor(const char * name) : name(name) {}
    kvf_tensor & operator=(ggml_tensor * other) { tensor = other; return *this; }
    operator ggml_tensor *() const { return tensor; }
    ggml_tensor * operator->() const {
        if (tensor == nullptr) {
            kvf_missing(name);
        }
        return tensor;
    }

  private:
    const char *  name;
    ggml_tensor * tensor = nullptr;
};

// Throw if a graph has a node that neither of its backends computes: a CPU would end the process within the step. With
// `filled` the inputs have their values, and rows that they name are looked for.
void kvf_check_graph(ggml_cgraph * graph, ggml_backend_t backend, ggml_backend_t cpu, bool filled);
