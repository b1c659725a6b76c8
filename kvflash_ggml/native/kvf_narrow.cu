// Products of quantised weights with a few columns, by the tensor cores.
//
// A warp computes 16 rows with up to four groups of 8 columns. Its lanes load the weights from where they lie, in the order in
// which an mma wants them: the order of the 32 values of a sub-block is free, as long as weights and columns agree on it. They
// are unpacked once for all groups. Four warps of a block share 16 rows, and take every fourth block of 256 values. A column's
// sum does not depend on the other columns, and is rounded in an order that is written down, so a step has the same bits with
// any number of rows that is computed here.

#include "kvf_narrow.cuh"
#include "quantize.cuh"

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
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

static __device__ __forceinline__ void mma(int (&c)[4], const uint32_t (&a)[2], const uint32_t b) {
#ifdef AMPERE_MMA_AVAILABLE
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
#else
    GGML_UNUSED_VARS(c, a, b);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// Where the columns of a warp begin, and the last one there is, which stands in for those behind it.
struct columns {
    int first;
    int last;

    __device__ __forceinline__ int at(int group, int column) const { return min(first + COLS*group + column, last); }
};

// What a lane holds of 256 weights of rows g and g + 8, where g is lane/4; its part is lane%4. `add` adds their products with 128
// values of the columns: it reads those of column g, and what columns 2*part and 2*part + 1 are scaled with, since it has their
// sums.
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

    template <int half, int groups>
    __device__ __forceinline__ void add(float (&sums)[groups][4], const block_q8_1_mmq * y, const columns & cols, int part) const {
        uint32_t scales[2], minima[2];
        float2 d[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const uint4 h = head[r];
            d[r]      = __half22float2(*(const half2 *) &h.x);
            scales[r] = half == 0 ? h.y & 0x3F3F3F3F : (h.w & 0x0F0F0F0F) | ((h.y >> 2) & 0x30303030);
            minima[r] = half == 0 ? h.z & 0x3F3F3F3F : ((h.w >> 4) & 0x0F0F0F0F) | ((h.z >> 2) & 0x30303030);
        }
        uint32_t a[4][4];
        float scale[4][2], min[4][2];
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
                scale[k][r] =  d[r].x * (float) ((scales[r] >> 8*k) & 0xFF);
                min[k][r]   = -d[r].y * (float) ((minima[r] >> 8*k) & 0xFF);
            }
        }
#pragma unroll
        for (int g = 0; g < groups; ++g) {
            const uint2 * values = (const uint2 *) y[cols.at(g, threadIdx.x/4)].qs + part;
            const uint4   of[2]  = {*(const uint4 *) y[cols.at(g, 2*part)].ds4, *(const uint4 *) y[cols.at(g, 2*part + 1)].ds4};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                int c[4] = {INT_AS_FLOAT, INT_AS_FLOAT, INT_AS_FLOAT, INT_AS_FLOAT};
                mma(c, a[k], values[4*k]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 e = __half22float2(((const half2 *) &of[i%2])[k]);
                    sums[g][i] = __fmaf_rn(__fmul_rn(scale[k][i/2], e.x), value(c[i]), __fmaf_rn(min[k][i/2], e.y, sums[g][i]));
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

    template <int half, int groups>
    __device__ __forceinline__ void add(float (&sums)[groups][4], const block_q8_1_mmq * y, const columns & cols, int part) const {
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
            const uint32_t * values = (const uint32_t *) y[cols.at(g, threadIdx.x/4)].qs + part;
            const float4     of[2]  = {*(const float4 *) y[cols.at(g, 2*part)].d4, *(const float4 *) y[cols.at(g, 2*part + 1)].d4};
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                int c[4] = {INT_AS_FLOAT, INT_AS_FLOAT, INT_AS_FLOAT, INT_AS_FLOAT};
                mma(c, a[n], values[4*n]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float e = ((const float *) &of[i%2])[n/2];
                    sums[g][i] = __fmaf_rn(__fmul_rn(scale[n][i/2], e), value(c[i]), sums[g][i]);
                }
            }
        }
    }
};

template <ggml_type type, int groups>
static __global__ void __launch_bounds__(WARPS*WARP_SIZE, groups > 1 ? 3 : 4) narrow(
        const char * x, const block_q8_1_mmq * y, float * dst, const int nrows, const int nblocks, const size_t stride_row,
        const int ncols, const size_t stride_dst, const bool early) {
    const int lane = threadIdx.x;
    const int part = lane % 4;
    const int wide = (ncols + COLS*groups - 1)/(COLS*groups);
    const int row0 = blockIdx.x/wide*ROWS; // columns of the same rows run side by side, and find the weights in the cache
    const columns cols = {(int) blockIdx.x%wide*COLS*groups, ncols - 1};

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
        const block_q8_1_mmq * first = y + (size_t) 2*i*ncols;
        w.template add<0>(sums, first, cols, part);
        w.template add<1>(sums, first + ncols, cols, part);
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
        const int col = cols.first + COLS*g + 2*part + j%2;
        if (row < nrows && col < ncols) {
            dst[col*stride_dst + row] = parts[0][g][j][lane] + parts[1][g][j][lane] + parts[2][g][j][lane] + parts[3][g][j][lane];
        }
    }
}

bool kvf_narrow_wanted(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc) {
    static const char * kernels = getenv("KVFLASH_KERNELS");
    static const bool   stock   = kernels != nullptr && strcmp(kernels, "stock") == 0;
    const bool known = src0->type == GGML_TYPE_Q4_K || src0->type == GGML_TYPE_Q5_K || src0->type == GGML_TYPE_Q6_K;
    if (stock || !known || cc != GGML_CUDA_CC_HOPPER || src0->ne[2]*src0->ne[3] != 1) {
        return false;
    }
    const int64_t sequences = src1->ne[2]*src1->ne[3];
    const int64_t columns   = src1->ne[1]*sequences;
    if (sequences > 1) {
        return columns <= KVF_NARROW_MAX_SEQUENCES && ggml_is_contiguous(src1) && ggml_is_contiguous(dst);
    }
    return columns >= (src0->type == GGML_TYPE_Q6_K ? KVF_NARROW_MIN_Q6_K : KVF_NARROW_MIN) && columns <= KVF_NARROW_MAX;
}

void kvf_narrow(ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst) {
    const int64_t ncols  = ggml_nrows(src1);
    const int64_t padded = GGML_PAD(src1->ne[0], MATRIX_ROW_PADDING);
    ggml_cuda_pool_alloc<char> y(ctx.pool(), ncols*padded*sizeof(block_q8_1)/QK8_1);
    cudaStream_t stream = ctx.stream();
    quantize_mmq_q8_1_cuda((const float *) src1->data, nullptr, y.get(), src0->type, src1->ne[0], src1->nb[1]/sizeof(float), 0, 0,
        padded, ncols, 1, 1, stream);
    CUDA_CHECK(cudaGetLastError());

    const bool early = ggml_backend_buffer_get_usage(src0->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    const int  nrows = src0->ne[1];
    const int  all    = (ncols + COLS - 1)/COLS;
    const int  wide   = (all + MOST - 1)/MOST;
    const int  groups = (all + wide - 1)/wide;
    const dim3 blocks((nrows + ROWS - 1)/ROWS * ((all + groups - 1)/groups));
    const ggml_cuda_kernel_launch_params params(blocks, dim3(WARP_SIZE, WARPS), 0, stream);
    const auto launch = [&](auto kernel) {
        ggml_cuda_kernel_launch(kernel, params, (const char *) src0->data, (const block_q8_1_mmq *) y.get(), (float *) dst->data, nrows,
            (int) (src0->ne[0]/QK_K), (size_t) src0->nb[1], (int) ncols, (size_t) (dst->nb[1]/sizeof(float)), early);
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
