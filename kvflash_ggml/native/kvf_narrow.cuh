// Products of quantised weights with a few columns: a token, verified drafts, and one token of each of several sequences.
#pragma once

#include "common.cuh"

// As found on an H200: 64 columns are multiplied in 0.74 of the matrix kernel's time. A single one is left to the vector kernel if
// few rows would leave multiprocessors idle; the fewest compared with it are 5,120. The odd blocks of Q6_K are read better by
// the vector kernel for fewer than four columns, and beyond 32 they were not tried. Columns in a third dimension, where the
// sequences of a step with recurrent state are, are left to neither: the vector kernel would read the weights for each of them.
#define KVF_NARROW_MAX 64
#define KVF_NARROW_ROWS_FOR_ONE 4096
#define KVF_NARROW_MIN_Q6_K 4
#define KVF_NARROW_MAX_Q6_K 32

// Is this product computed here? `src0` are the weights.
bool kvf_narrow_wanted(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc);

void kvf_narrow(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst);
