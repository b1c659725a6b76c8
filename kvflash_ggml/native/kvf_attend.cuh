// Attention of a few rows: a token, a few drafts, and tokens of several sequences, each of which sees its own slots.
#pragma once

#include "common.cuh"

// As found on an H200. Rows of one sequence see the same slots, and each reads them by itself. Up to three rows of Q8_0 over 4,096
// slots and more that is faster than upstream's kernels: the vector kernel reads a key for each head, and the matrix kernel
// converts all of them to float16 before. A single row of F16 was slower with some shapes, and heads that share no key were tried
// only for several sequences. Rows of several sequences (`op_params[15]` counts these) see different slots, where the matrix kernel
// reads all slots for each eight rows. More than 64 rows were not tried. Where a sequence has more than three on average,
// upstream's kernel reads a slot once for several rows. The most slots bound a row's list in shared memory.
#define KVF_ATTEND_MAX 3
#define KVF_ATTEND_LEAST_SLOTS 4096
#define KVF_ATTEND_MAX_APART 64
#define KVF_ATTEND_MOST_SLOTS (1 << 21)

// Is this attention computed here?
bool kvf_attend_wanted(const ggml_tensor * dst, int cc);

void kvf_attend(ggml_backend_cuda_context & ctx, ggml_tensor * dst);
