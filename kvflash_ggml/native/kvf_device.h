// What ggml knows of devices. Plain host memory counts as the CPU's.
#pragma once

#include "kvf.h"

#include "ggml-backend.h"

bool               kvf_is_cpu(ggml_backend_dev_t dev);
bool               kvf_is_cuda(ggml_backend_dev_t dev);  // its kernels, built for a GPU of any make
const char *       kvf_backend_name(ggml_backend_dev_t dev);
ggml_backend_dev_t kvf_device_of(const ggml_tensor * tensor);     // whose memory it is in
kvf_device         kvf_describe_device(ggml_backend_dev_t dev);   // without what only an engine knows

// Zero bytes of a tensor, at once: all compute that reads or writes them is done.
void kvf_zero(ggml_tensor * tensor, size_t offset, size_t size);
