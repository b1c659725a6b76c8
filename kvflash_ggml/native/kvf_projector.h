// What libmtmd asks before it hands a stranger's tensors to ggml. What is wrong throws std::runtime_error, which its own
// calls catch.
#pragma once

#include "ggml-backend.h"
#include "ggml.h"
#include "kvf_guard.h"

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
