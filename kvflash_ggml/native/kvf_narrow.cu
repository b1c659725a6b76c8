// Products of quantised weights with a few columns, by the tensor cores.
//
// A warp computes 16 rows with up to four groups of 8 columns. Its lanes load the weights from where they lie, in the order in
// which an mma wants them: the order of the 32 values of a sub-block is free, as long as weights and columns agree on it. They
// are unpacked once for all groups. A kernel before rounds the columns to 8 bits and lays them out in that order, so that
// neighbouring lanes read neighbouring 16 bytes. Four warps of a block share 16 rows, and take every fourth block of 256 values.
// A column's sum does not depend on the other columns, so a step has the same bits with any number of rows that is computed here.

#include "kvf_narrow.cuh"

static constexpr int ROWS  = 16; // of a block, as an mma has them
static constexpr int COLS  = 8;
static constexpr int WARPS = 4;
static constexpr int MOST  = 4;  // groups of columns that a warp has the registers for

// Integers are added to this, so that their bits are those of 12582912 and the integer as a float.
static constexpr int   INT_AS_FLOAT = 0x4B400000;
static constexpr float ZERO         = 12582912.0f;

static __device__ __forceinline__ float value(int sum) {
    return __int_as_float(sum) - ZERO;
}

static __device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[4], const uint2 b) {
#ifdef AMPERE_MMA_AVAILABLE
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(INT_AS_FLOAT));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

static __device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[2], const uint32_t b) {
#ifdef AMPERE_MMA_AVAILABLE
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %7, %7, %7};"
        : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b), "r"(INT_AS_FLOAT));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

static __device__ __forceinline__ void mma(float (&c)[4], const float (&a)[4], const float2 b) {
#ifdef AMPERE_MMA_AVAILABLE
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
          "r"(__float_as_uint(b.x)), "r"(__float_as_uint(b.y)), "f"(0.0f));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// Rounded to what an mma reads of a float.
static __device__ __forceinline__ float tf32(float x) {
    uint32_t bits = 0;
#ifdef AMPERE_MMA_AVAILABLE
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
#else
    GGML_UNUSED(x);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
    return __uint_as_float(bits);
}

// 256 values of eight columns. Lane 4*c + p reads the values of column c that meet part p of the weights: four words, for two
// sub-blocks of 32 weights or four of 16.
struct eight {
    uint32_t values[4][WARP_SIZE][4];
    float    scales[COLS][8];  // of 32 values
    float2   sums[COLS][4];    // of sub-blocks p and p + 4, for the minima. They are sums of the values as they were rounded: so an
                               // error of rounding meets a weight, and not the larger number above its minimum
};

// A warp rounds 256 values of a column, a lane 8 of them. Columns that are not there stay as the memory was: nothing reads their
// sums.
template <bool sixteen>
static __global__ void narrow_columns(const float * x, eight * y, const int nblocks, const int eights, const int64_t stride) {
    ggml_cuda_pdl_sync();
    const int i = blockIdx.x*WARPS + threadIdx.y;
    const int col = blockIdx.y;
    if (i >= nblocks) {
        return;
    }
    const int k = threadIdx.x/4, part = threadIdx.x%4;
    float v[8];
    const float4 * from = (const float4 *) (x + col*stride + 256*i + 8*threadIdx.x);
    *(float4 *) &v[0] = from[0];
    *(float4 *) &v[4] = from[1];
    uint32_t bits = 0; // of the largest, in an order in which NaN is larger than all numbers
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        bits = max(bits, __float_as_uint(v[j]) & 0x7FFFFFFF);
    }
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFF, bits, 1));
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFF, bits, 2));
    const float most    = __uint_as_float(bits);
    const float scale   = most/127.0f;
    const float inverse = most > 0.0f ? 127.0f/most : 0.0f;
    uint32_t q[2] = {};
    float sum = 0.0f; // exact: of small integers
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const int rounded = __float2int_rn(v[j]*inverse);
        q[j/4] |= (rounded & 0xFF) << 8*(j%4);
        sum += rounded;
    }
    eight & to = y[i*eights + col/COLS];
    const int lane = 4*(col%COLS);
    if (part == 0) {
        to.scales[col%COLS][k] = scale;
    }
    if constexpr (sixteen) {
        const int n = 2*k + part/2;
        to.values[n/4][lane + 2*(part%2) + 0][n%4] = q[0];
        to.values[n/4][lane + 2*(part%2) + 1][n%4] = q[1];
    } else {
        *(uint2 *) &to.values[k/2][lane + part][2*(k%2)] = make_uint2(q[0], q[1]);
        sum = warp_reduce_sum<4>(sum);
        if (part == 0) {
            ((float *) &to.sums[col%COLS][k%4])[k/4] = tf32(scale*sum);
        }
    }
    ggml_cuda_pdl_lc();
}

// What a lane holds of 256 weights of rows g and g + 8, where g is lane/4; its part is lane%4. `add` adds their products with the
// columns: it reads its values of column g, and what columns 2*part and 2*part + 1 are scaled with, since it has their sums.
template <ggml_type type> struct weights;

template <typename block, bool fifth> struct weights_45 {
    uint4 head[2]; // d, the minima's d, and eight scales and minima of 6 bits each
    uint2 high[2];
    uint2 low[2][4];

    __device__ __forceinline__ void load(const char * (&rows)[2], int i, int part) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const block * b = (const block *) rows[r] + i;
            head[r] = __ldg((const uint4 *) b);
            if constexpr (fifth) {
                high[r] = __ldg((const uint2 *) b->qh + part);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                low[r][j] = __ldg((const uint2 *) (b->qs + 32*j) + part);
            }
        }
    }

    template <int groups>
    __device__ __forceinline__ void add(float (&sums)[groups][4], const eight * y, int part) const {
        float d[2], m[4];
        uint32_t scales[2][2]; // of rows, and of sub-blocks 0 to 3 and 4 to 7
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4 h = head[r];
            const float2 both = __half22float2(*(const half2 *) &h.x);
            d[r] = both.x;
            scales[r][0] = h.y & 0x3F3F3F3F;
            scales[r][1] = (h.w & 0x0F0F0F0F) | ((h.y >> 2) & 0x30303030);
            const uint32_t minima[2] = {h.z & 0x3F3F3F3F, ((h.w >> 4) & 0x0F0F0F0F) | ((h.z >> 2) & 0x30303030)};
            m[r + 0] = (float) ((minima[0] >> 8*part) & 0xFF);
            m[r + 2] = (float) ((minima[1] >> 8*part) & 0xFF);
        }
#pragma unroll
        for (int g = 0; g < groups; ++g) { // all minima at once
            float c[4];
            mma(c, m, y[g].sums[threadIdx.x/4][part]);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sums[g][i] = __fmaf_rn(-__high2float(*(const half2 *) &head[i/2].x), c[i], sums[g][i]);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t a[4][4];
            float scale[4][2];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint2 q = low[r][2*half + k/2];
                    a[k][r + 0] = (q.x >> 4*(k%2)) & 0x0F0F0F0F;
                    a[k][r + 2] = (q.y >> 4*(k%2)) & 0x0F0F0F0F;
                    if constexpr (fifth) {
                        a[k][r + 0] |= ((high[r].x >> (4*half + k)) & 0x01010101) << 4;
                        a[k][r + 2] |= ((high[r].y >> (4*half + k)) & 0x01010101) << 4;
                    }
                    scale[k][r] = d[r] * (float) ((scales[r][half] >> 8*k) & 0xFF);
                }
            }
#pragma unroll
            for (int g = 0; g < groups; ++g) {
                const float4 e[2] = {*(const float4 *) &y[g].scales[2*part + 0][4*half],
                                     *(const float4 *) &y[g].scales[2*part + 1][4*half]};
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    const uint4 v = *(const uint4 *) y[g].values[2*half + k/2][threadIdx.x];
                    int c[4];
                    mma(c, a[k], k%2 == 0 ? make_uint2(v.x, v.y) : make_uint2(v.z, v.w));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sums[g][i] = __fmaf_rn(__fmul_rn(scale[k][i/2], ((const float *) &e[i%2])[k]), value(c[i]), sums[g][i]);
                    }
                }
            }
        }
    }
};

template <> struct weights<GGML_TYPE_Q4_K> : weights_45<block_q4_K, false> {};
template <> struct weights<GGML_TYPE_Q5_K> : weights_45<block_q5_K, true> {};

template <> struct weights<GGML_TYPE_Q6_K> {
    uint32_t low[2][8];  // 4 bytes of each 16
    uint32_t high[2][4];
    uint32_t scales[2][4];
    float    d[2];

    // blocks of 210 bytes: nothing is aligned to more than two
    static __device__ __forceinline__ uint32_t word(const void * p) {
        const uint16_t * q = (const uint16_t *) p;
        return __ldg(q) | (uint32_t) __ldg(q + 1) << 16;
    }

    __device__ __forceinline__ void load(const char * (&rows)[2], int i, int part) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const block_q6_K * b = (const block_q6_K *) rows[r] + i;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                low[r][j] = word(b->ql + 16*j + 4*part);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                high[r][j]   = word(b->qh + 16*j + 4*part);
                scales[r][j] = word(b->scales + 4*j);
            }
            d[r] = __half2float(__ushort_as_half(__ldg((const uint16_t *) &b->d)));
        }
    }

    template <int groups>
    __device__ __forceinline__ void add(float (&sums)[groups][4], const eight * y, int part) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t a[8][2];
            float scale[8][2];
#pragma unroll
            for (int n = 0; n < 8; ++n) { // each 16 values have a scale
                const int k = n/2;
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const uint32_t four = (low[r][4*half + 2*(k%2) + n%2] >> 4*(k/2)) & 0x0F0F0F0F;
                    const uint32_t two  = (high[r][2*half + n%2] >> 2*k) & 0x03030303;
                    a[n][r]     = __vsubss4(four | two << 4, 0x20202020);
                    scale[n][r] = d[r] * (float) (int8_t) (scales[r][2*half + n/4] >> 8*(n%4));
                }
            }
#pragma unroll
            for (int g = 0; g < groups; ++g) {
                const float4 e[2] = {*(const float4 *) &y[g].scales[2*part + 0][4*half],
                                     *(const float4 *) &y[g].scales[2*part + 1][4*half]};
#pragma unroll
                for (int n = 0; n < 8; ++n) {
                    const uint4 v = *(const uint4 *) y[g].values[2*half + n/4][threadIdx.x];
                    int c[4];
                    mma(c, a[n], ((const uint32_t *) &v)[n%4]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        sums[g][i] = __fmaf_rn(__fmul_rn(scale[n][i/2], ((const float *) &e[i%2])[n/2]), value(c[i]), sums[g][i]);
                    }
                }
            }
        }
    }
};

// Blocks on a multiprocessor: as many as there are registers for.
template <ggml_type type, int groups>
static __global__ void __launch_bounds__(WARPS*WARP_SIZE, groups > 1 ? 3 : type == GGML_TYPE_Q6_K ? 4 : 5) narrow(
        const char * x, const eight * y, float * dst, const int nrows, const int nblocks, const size_t stride_row, const int ncols,
        const int eights, const size_t stride_dst, const bool early) {
    const int lane = threadIdx.x;
    const int part = lane % 4;
    const int wide = eights/groups;
    const int row0 = blockIdx.x/wide*ROWS; // columns of the same rows run side by side, and find the weights in the cache
    const int first = (int) blockIdx.x%wide*groups; // of its groups of columns

    const char * rows[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        rows[r] = x + min(row0 + lane/4 + 8*r, nrows - 1)*stride_row;
    }

    weights<type> w;
    int i = threadIdx.y;
    if (early && i < nblocks) {
        w.load(rows, i, part); // weights do not depend on what runs before
    }
    ggml_cuda_pdl_sync();
    if (!early && i < nblocks) {
        w.load(rows, i, part);
    }

    float sums[groups][4] = {};
    while (i < nblocks) {
        w.add(sums, y + i*eights + first, part);
        i += WARPS;
        if (i < nblocks) {
            w.load(rows, i, part);
        }
    }

    __shared__ float parts[WARPS][groups][4][WARP_SIZE];
#pragma unroll
    for (int g = 0; g < groups; ++g) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            parts[threadIdx.y][g][j][lane] = sums[g][j];
        }
    }
    __syncthreads();
    ggml_cuda_pdl_lc();

    static_assert(WARPS == 4, "a warp writes one sum of each lane");
    const int j = threadIdx.y;
    const int row = row0 + lane/4 + 8*(j/2);
#pragma unroll
    for (int g = 0; g < groups; ++g) {
        const int col = COLS*(first + g) + 2*part + j%2;
        if (row < nrows && col < ncols) {
            dst[col*stride_dst + row] = parts[0][g][j][lane] + parts[1][g][j][lane] + parts[2][g][j][lane] + parts[3][g][j][lane];
        }
    }
}

bool kvf_narrow_wanted(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc) {
    static const char * kernels = getenv("KVFLASH_KERNELS");
    static const bool   stock   = kernels != nullptr && strcmp(kernels, "stock") == 0;
    const bool known = src0->type == GGML_TYPE_Q4_K || src0->type == GGML_TYPE_Q5_K || src0->type == GGML_TYPE_Q6_K;
    if (stock || !known || cc != GGML_CUDA_CC_HOPPER || !ampere_mma_available(cc) || src0->ne[2]*src0->ne[3] != 1) {
        return false;
    }
    if ((uintptr_t) src1->data % 16 != 0 || src1->nb[1] % 16 != 0) {
        return false; // a lane reads four floats of a column at once
    }
    const int64_t sequences = src1->ne[2]*src1->ne[3];
    const int64_t columns   = src1->ne[1]*sequences;
    if (sequences > 1) {
        return columns <= KVF_NARROW_MAX && ggml_is_contiguous(src1) && ggml_is_contiguous(dst);
    }
    if (src0->type == GGML_TYPE_Q6_K) {
        return columns >= KVF_NARROW_MIN_Q6_K && columns <= KVF_NARROW_MAX_Q6_K;
    }
    return columns <= KVF_NARROW_MAX && (columns > 1 || src0->ne[1] >= KVF_NARROW_ROWS_FOR_ONE);
}

void kvf_narrow(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    const int ncols   = ggml_nrows(src1);
    const int nblocks = src0->ne[0]/QK_K;
    const int nrows   = src0->ne[1];
    const int all     = (ncols + COLS - 1)/COLS;
    const int wide    = (all + MOST - 1)/MOST;
    const int groups  = (all + wide - 1)/wide;
    const int eights  = wide*groups;
    const bool early  = ggml_backend_buffer_get_usage(src0->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    ggml_cuda_pool_alloc<eight> y(ctx.pool(), (size_t) nblocks*eights);
    cudaStream_t stream = ctx.stream();

    const int64_t stride = ggml_is_contiguous(src1) ? src1->ne[0] : src1->nb[1]/sizeof(float);
    const ggml_cuda_kernel_launch_params rounds(dim3((nblocks + WARPS - 1)/WARPS, ncols), dim3(WARP_SIZE, WARPS), 0, stream);
    ggml_cuda_kernel_launch(src0->type == GGML_TYPE_Q6_K ? narrow_columns<true> : narrow_columns<false>, rounds,
        (const float *) src1->data, y.get(), nblocks, eights, stride);

    const dim3 blocks((nrows + ROWS - 1)/ROWS*wide);
    const ggml_cuda_kernel_launch_params params(blocks, dim3(WARP_SIZE, WARPS), 0, stream);
    const auto launch = [&](auto kernel) {
        ggml_cuda_kernel_launch(kernel, params, (const char *) src0->data, (const eight *) y.get(), (float *) dst->data, nrows,
            nblocks, (size_t) src0->nb[1], ncols, eights, (size_t) (dst->nb[1]/sizeof(float)), early);
    };
    const auto launch_type = [&](auto type) {
        switch (groups) {
            case 1:  launch(narrow<type(), 1>); break;
            case 2:  launch(narrow<type(), 2>); break;
            case 3:  launch(narrow<type(), 3>); break;
            default: launch(narrow<type(), MOST>); break;
        }
    };
    switch (src0->type) {
        case GGML_TYPE_Q4_K: launch_type(std::integral_constant<ggml_type, GGML_TYPE_Q4_K>()); break;
        case GGML_TYPE_Q5_K: launch_type(std::integral_constant<ggml_type, GGML_TYPE_Q5_K>()); break;
        default:             launch_type(std::integral_constant<ggml_type, GGML_TYPE_Q6_K>()); break;
    }
}
