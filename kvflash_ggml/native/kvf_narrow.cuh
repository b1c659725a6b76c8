// Products of quantised weights with a few columns: verified drafts, and one token of each of several sequences.
#pragma once

#include "common.cuh"

// Columns, as found on an H100: before that the vector kernel is as fast (it reads the odd blocks of Q6_K better), from 33 on the
// matrix kernel. Columns in a third dimension, where the sequences of a step with recurrent state are, are left to neither: the
// vector kernel would read the weights once for each of them.
#define KVF_NARROW_MIN 2
#define KVF_NARROW_MIN_Q6_K 4
#define KVF_NARROW_MAX 32
#define KVF_NARROW_MAX_SEQUENCES 64

// Is this product computed here? `src0` are the weights.
bool kvf_narrow_wanted(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc);

void kvf_narrow(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst);
