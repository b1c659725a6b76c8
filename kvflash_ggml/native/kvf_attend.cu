// Attention of a few rows, by the tensor cores.
//
// A kernel lists for each row the tiles of 64 slots of which it sees one. A block computes a part of a row's list with up to eight
// heads that share a key. So tiles that the row does not see are not read, and others as they lie in the pool. Eight warps share a
// tile.
// For the scores, four of them have 16 slots each and half of a head's values, and the others the other half. For the softmax a
// warp has a head. For the sum it has 32 of a head's values, for all slots or for a part of them. The float16 that values of
// Q8_0 are unpacked to are those that upstream's matrix kernel reads. Their order within a block of 32 is free, as long as keys and
// queries have the same.

#include "kvf_attend.cuh"

#include "fattn-common.cuh"

static constexpr int TILE  = 64;
static constexpr int HEADS = 8;
static constexpr int WARPS = 8;

static __device__ __forceinline__ void mma(float (&c)[4], const half2 (&a)[4], const uint32_t b0, const uint32_t b1) {
#ifdef AMPERE_MMA_AVAILABLE
    const uint32_t * A = (const uint32_t *) a;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(A[0]), "r"(A[1]), "r"(A[2]), "r"(A[3]), "r"(b0), "r"(b1));
#else
    GGML_UNUSED_VARS(c, a, b0, b1);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

// Four squares of 8 by 8 float16, transposed. A lane names a row.
static __device__ __forceinline__ void load_transposed(half2 (&a)[4], const void * row) {
#ifdef AMPERE_MMA_AVAILABLE
    uint32_t * A = (uint32_t *) a;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(A[0]), "=r"(A[1]), "=r"(A[2]), "=r"(A[3]) : "r"((uint32_t) __cvta_generic_to_shared(row)) : "memory");
#else
    GGML_UNUSED_VARS(a, row);
    NO_DEVICE_CODE;
#endif // AMPERE_MMA_AVAILABLE
}

template <int bytes>
static __device__ __forceinline__ void copy(void * to, const void * from) {
#ifdef CP_ASYNC_AVAILABLE
    const uint32_t at = __cvta_generic_to_shared(to);
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(at), "l"(from) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(at), "l"(from), "n"(bytes) : "memory");
    }
#else
    GGML_UNUSED_VARS(to, from);
    NO_DEVICE_CODE;
#endif // CP_ASYNC_AVAILABLE
}

// Lists the tiles of which a row sees a slot. A block does a row; eight threads read a tile.
static __global__ void __launch_bounds__(1024) list_tiles(
        const half * mask, int * tiles, int * counts, const int n_tiles, const int64_t stride) {
    extern __shared__ uint8_t seen[];
    __shared__ int sums[32];
    const int row = blockIdx.x, tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    ggml_cuda_pdl_sync();
    ggml_cuda_pdl_lc();
    const uint4 * m = (const uint4 *) (mask + row*stride);
#pragma unroll 4
    for (int t0 = 0; t0 < n_tiles; t0 += 128) {
        const int t = t0 + tid/8;
        uint4 v = make_uint4(0xFC00FC00, 0xFC00FC00, 0xFC00FC00, 0xFC00FC00);
        if (t < n_tiles) {
            v = m[8*t + tid%8];
        }
        const bool any = v.x != 0xFC00FC00 || v.y != 0xFC00FC00 || v.z != 0xFC00FC00 || v.w != 0xFC00FC00;
        const uint32_t ballot = __ballot_sync(0xFFFFFFFF, any);
        if (tid % 8 == 0 && t < n_tiles) {
            seen[t] = ((ballot >> (lane & 24)) & 0xFF) != 0;
        }
    }
    __syncthreads();
    const int per = (n_tiles + 1023)/1024;
    const int begin = min(per*tid, n_tiles), end = min(begin + per, n_tiles);
    int count = 0;
    for (int t = begin; t < end; ++t) {
        count += seen[t];
    }
    const int before = warp_prefix_inclusive_sum(count);
    if (lane == 31) {
        sums[warp] = before;
    }
    __syncthreads();
    const int all = warp_prefix_inclusive_sum(sums[lane]);
    if (tid == 31) {
        counts[row] = all;
    }
    int at = before - count + (warp > 0 ? __shfl_sync(0xFFFFFFFF, all, warp - 1) : 0);
    for (int t = begin; t < end; ++t) {
        if (seen[t]) {
            tiles[(int64_t) row*n_tiles + at++] = t;
        }
    }
}

// Word i of the 8 of a block of 32 values. Those of even blocks begin in the middle of a word.
static __device__ __forceinline__ uint32_t word(const uint32_t * row, const int block, const int i) {
    const uint32_t * at = row + 17*(block/2) + 9*(block%2) + i;
    return block % 2 ? at[0] : __funnelshift_r(at[0], at[1], 16);
}

// Two values as float16: bytes 0 and 1 or 2 and 3.
static __device__ __forceinline__ half2 dequantize(const uint32_t offset, const uint32_t selector, const half2 scale) {
    const uint32_t bits = __byte_perm(offset, 0x64646464, selector); // 1024 + 128 + value
    return __hmul2(__hsub2(*(const half2 *) &bits, __float2half2_rn(1152.0f)), scale);
}

struct layout {
    int64_t q_row, q_head, k_slot, k_head, v_slot, v_head, mask_row;
    int     ratio, heads, n_tiles;
};

template <int D, bool q8> struct sizes {
    static constexpr int chunk  = q8 ? D/16 : 16; // bytes that are copied at once: of the 17*D/16 of a head of a slot, or of 2*D
    static constexpr int chunks = q8 ? 17 : D/8;
    static constexpr int stride = q8 ? (17*D/64 + 3)/4*4 : D/2 + 4; // words: neighbouring slots in other banks
    static constexpr int blocks = D/32;
    static constexpr int parts  = WARPS/blocks;    // of a tile's slots, where a head has fewer values than warps could sum
    static constexpr int stage  = 2*TILE*stride;
    static constexpr int bytes  = 2*stage*4 + 2*HEADS*(TILE + 4)*4 + HEADS*(TILE + 8)*2 + 2*HEADS*4;
    static constexpr int blocks_per_sm = D == 256 && !q8 ? 1 : 3; // at most: the shared memory has room for one, or for three
};

template <int D, bool q8>
static __global__ void __launch_bounds__(32*WARPS, sizes<D, q8>::blocks_per_sm) attend(
        const char * Q, const char * K, const char * V, const half * mask, const int * tiles, const int * counts, float * out,
        float2 * meta, const float scale, const layout l) {
    using size = sizes<D, q8>;
    extern __shared__ __align__(16) uint32_t shared[];
    float * scores = (float *) (shared + 2*size::stage); // of halves, heads, slots
    half  * probs  = (half *) (scores + 2*HEADS*(TILE + 4));
    float * rescale = (float *) (probs + HEADS*(TILE + 8));
    float * row_sum = rescale + HEADS;

    const int lane = threadIdx.x, warp = threadIdx.y, tid = 32*warp + lane;
    const int g = lane/4, p = lane%4;
    const int groups = (l.ratio + HEADS - 1)/HEADS;
    const int row = blockIdx.x, split = blockIdx.y, splits = gridDim.y;
    const int key = blockIdx.z/groups, group = blockIdx.z%groups; // the head of keys, and which of its groups of heads
    const int head0 = key*l.ratio + HEADS*group;
    const int heads = min(HEADS, l.ratio - HEADS*group);

    ggml_cuda_pdl_sync();
    const int count = counts[row];
    const int first = (int64_t) count*split/splits, last = (int64_t) count*(split + 1)/splits;
    tiles += (int64_t) row*l.n_tiles;
    mask  += row*l.mask_row;
    K += key*l.k_head;
    V += key*l.v_head;

    const auto fetch = [&](const int tile, const int stage) {
        uint32_t * to = shared + stage*size::stage;
#pragma unroll
        for (int j = tid; j < size::chunks*TILE; j += 32*WARPS) {
            const int slot = j/size::chunks, c = j%size::chunks;
            char * at = (char *) (to + slot*size::stride) + c*size::chunk;
            const int64_t s = TILE*tile + slot;
            copy<size::chunk>(at, K + s*l.k_slot + c*size::chunk);
            copy<size::chunk>(at + TILE*size::stride*4, V + s*l.v_slot + c*size::chunk);
        }
#ifdef CP_ASYNC_AVAILABLE
        asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
    };

    int tile = 0;
    if (first < last) {
        tile = tiles[first];
        fetch(tile, 0);
    }

    const int dims = warp/4, slots = 16*(warp%4); // which half of a head's values, and the first slot
    constexpr int mine = D/64; // blocks of a half
    uint32_t q[mine][2][2];
#pragma unroll
    for (int b = 0; b < mine; ++b) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (g < heads) {
                v = *(const float4 *) (Q + row*l.q_row + (head0 + g)*l.q_head + 4*(dims*(D/2) + 32*b + 16*i + 4*p));
            }
            const half2 lo = __floats2half2_rn(v.x*scale, v.y*scale), hi = __floats2half2_rn(v.z*scale, v.w*scale);
            q[b][i][0] = *(const uint32_t *) &lo;
            q[b][i][1] = *(const uint32_t *) &hi;
        }
    }

    float row_max = -FLT_MAX/2.0f, sum = 0.0f; // of head `warp`
    float acc[2][4] = {};
    const int block = warp%size::blocks, part = warp/size::blocks;
    for (int n = first; n < last; ++n) {
        const uint32_t * k = shared + (n - first)%2*size::stage;
        const uint32_t * v = k + TILE*size::stride;
        const float hidden[2] = {__half2float(mask[TILE*tile + lane]), __half2float(mask[TILE*tile + lane + 32])};
        const int next = n + 1 < last ? tiles[n + 1] : 0;
#ifdef CP_ASYNC_AVAILABLE
        asm volatile("cp.async.wait_group 0;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
        __syncthreads();
        if (n + 1 < last) {
            fetch(next, (n + 1 - first)%2);
        }

        float c[4] = {};
#pragma unroll
        for (int b = 0; b < mine; ++b) {
            half2 a[2][4];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const uint32_t * at = k + (slots + g + 8*r)*size::stride;
                const int of = mine*dims + b;
                if constexpr (q8) {
                    const half2 d = __half2half2(((const half *) at)[17*of]);
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint32_t w = word(at, of, p + 4*i) ^ 0x80808080;
                        a[i][r + 0] = dequantize(w, 0x4140, d);
                        a[i][r + 2] = dequantize(w, 0x4342, d);
                    }
                } else {
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const uint2 w = *(const uint2 *) (at + 16*of + 8*i + 2*p);
                        a[i][r + 0] = *(const half2 *) &w.x;
                        a[i][r + 2] = *(const half2 *) &w.y;
                    }
                }
            }
            mma(c, a[0], q[b][0][0], q[b][0][1]);
            mma(c, a[1], q[b][1][0], q[b][1][1]);
        }
        float * to = scores + (HEADS*dims + 2*p)*(TILE + 4) + slots + g;
        to[0] = c[0];
        to[TILE + 4] = c[1];
        to[8] = c[2];
        to[TILE + 4 + 8] = c[3];
        __syncthreads();

        {
            const float * from = scores + warp*(TILE + 4) + lane;
            const float s[2] = {from[0] + from[HEADS*(TILE + 4)] + hidden[0],
                                from[32] + from[HEADS*(TILE + 4) + 32] + hidden[1]};
            const float now = fmaxf(row_max, warp_reduce_max(fmaxf(s[0], s[1])));
            const float factor = expf(row_max - now);
            const float e[2] = {expf(s[0] - now), expf(s[1] - now)};
            row_max = now;
            sum = sum*factor + warp_reduce_sum(e[0] + e[1]);
            probs[warp*(TILE + 8) + lane]      = __float2half(e[0]);
            probs[warp*(TILE + 8) + lane + 32] = __float2half(e[1]);
            if (lane == 0) {
                rescale[warp] = factor;
            }
        }
        __syncthreads();

        const float2 factors = *(const float2 *) (rescale + 2*p);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            acc[i][0] *= factors.x;
            acc[i][1] *= factors.y;
            acc[i][2] *= factors.x;
            acc[i][3] *= factors.y;
        }
        constexpr int steps = TILE/16/size::parts;
#pragma unroll
        for (int i = 0; i < steps; ++i) {
            const int slot = 16*(part*steps + i);
            const uint32_t b0 = *(const uint32_t *) (probs + g*(TILE + 8) + slot + 2*p);
            const uint32_t b1 = *(const uint32_t *) (probs + g*(TILE + 8) + slot + 2*p + 8);
            if constexpr (q8) {
                uint32_t w[4];
                half d[4];
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint32_t * at = v + (slot + 2*p + 8*(j/2) + j%2)*size::stride;
                    w[j] = word(at, block, g) ^ 0x80808080;
                    d[j] = ((const half *) at)[17*block];
                }
                const half2 d0 = __halves2half2(d[0], d[1]), d1 = __halves2half2(d[2], d[3]);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const uint32_t t0 = __byte_perm(w[0], w[1], j == 0 ? 0x5140 : 0x7362);
                    const uint32_t t1 = __byte_perm(w[2], w[3], j == 0 ? 0x5140 : 0x7362);
                    const half2 a[4] = {dequantize(t0, 0x4140, d0), dequantize(t0, 0x4342, d0),
                                        dequantize(t1, 0x4140, d1), dequantize(t1, 0x4342, d1)};
                    mma(acc[j], a, b0, b1);
                }
            } else {
                const int of = lane/8;
                const uint32_t * at = v + (slot + lane%8 + 8*(of/2))*size::stride + 16*block + 4*(of%2);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    half2 a[4];
                    load_transposed(a, at + 8*j);
                    mma(acc[j], a, b0, b1);
                }
            }
        }
        tile = next;
    }
    ggml_cuda_pdl_lc();

    __syncthreads();
    float * o = (float *) shared; // of parts, heads, values
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float * at = o + (part*HEADS + 2*p + i)*(D + 8) + 32*block;
        if constexpr (q8) {
            *(float4 *) (at + 4*g) = make_float4(acc[0][i], acc[0][i + 2], acc[1][i], acc[1][i + 2]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                at[8*j + g] = acc[j/2][i + 2*(j%2)];
            }
        }
    }
    const int64_t base = ((int64_t) row*l.heads + head0)*splits + split;
    if (lane == 0) {
        row_sum[warp] = sum;
        if (splits > 1 && warp < heads) {
            meta[base + warp*splits] = make_float2(row_max, sum);
        }
    }
    __syncthreads();
    for (int j = tid; j < heads*D; j += 32*WARPS) {
        const int head = j/D, i = j%D;
        float value = 0.0f;
#pragma unroll
        for (int n = 0; n < size::parts; ++n) {
            value += o[(n*HEADS + head)*(D + 8) + i];
        }
        out[(base + head*splits)*D + i] = splits > 1 ? value : value/row_sum[head];
    }
}

bool kvf_attend_wanted(const ggml_tensor * dst, int cc) {
    static const char * kernels = getenv("KVFLASH_KERNELS");
    static const bool   stock   = kernels != nullptr && strcmp(kernels, "stock") == 0;
    const ggml_tensor * Q = dst->src[0], * K = dst->src[1], * V = dst->src[2], * mask = dst->src[3], * sinks = dst->src[4];
    const bool q8 = K->type == GGML_TYPE_Q8_0;
    if (stock || cc != GGML_CUDA_CC_HOPPER || !ampere_mma_available(cc) || K->type != V->type ||
            (!q8 && K->type != GGML_TYPE_F16)) {
        return false;
    }
    float max_bias, softcap;
    memcpy(&max_bias, dst->op_params + 1, sizeof(float));
    memcpy(&softcap,  dst->op_params + 2, sizeof(float));
    const bool sparse = dst->op_params[4] != 0;
    if (max_bias != 0.0f || softcap != 0.0f || sparse || sinks != nullptr) {
        return false;
    }
    const int64_t D = K->ne[0], slots = K->ne[1], rows = Q->ne[1], ratio = Q->ne[2]/K->ne[2];
    if ((D != 64 && D != 128 && D != 256) || V->ne[0] != D || V->ne[2] != K->ne[2] || slots % 256 != 0 ||
            slots > KVF_ATTEND_MOST_SLOTS) {
        return false;
    }
    if (mask == nullptr || mask->ne[0] != slots || mask->ne[2]*mask->ne[3]*Q->ne[3] != 1) {
        return false;
    }
    for (const ggml_tensor * t : {Q, K, V, mask}) {
        const size_t aligned = q8 && (t == K || t == V) ? D/16 : 16; // what is loaded or copied at once
        if (t->nb[0] != ggml_type_size(t->type) || (uintptr_t) t->data % aligned != 0 || t->nb[1] % aligned != 0 ||
                t->nb[2] % aligned != 0) {
            return false;
        }
    }
    const int32_t sequences = dst->op_params[15];
    if (sequences > 1) {
        return rows <= KVF_ATTEND_MAX*sequences && rows <= KVF_ATTEND_MAX_APART;
    }
    return q8 && ratio > 1 && rows <= KVF_ATTEND_MAX && slots >= KVF_ATTEND_LEAST_SLOTS;
}

template <int D, bool q8>
static void attend_heads(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * Q = dst->src[0], * K = dst->src[1], * V = dst->src[2], * mask = dst->src[3];
    cudaStream_t stream = ctx.stream();
    const int rows = Q->ne[1], n_tiles = K->ne[1]/TILE;
    const layout l = {
        (int64_t) Q->nb[1], (int64_t) Q->nb[2], (int64_t) K->nb[1], (int64_t) K->nb[2], (int64_t) V->nb[1], (int64_t) V->nb[2],
        (int64_t) (mask->nb[1]/sizeof(half)), (int) (Q->ne[2]/K->ne[2]), (int) Q->ne[2], n_tiles,
    };
    const int shares = K->ne[2]*((l.ratio + HEADS - 1)/HEADS);
    const int at_once = sizes<D, q8>::blocks_per_sm*ggml_cuda_info().devices[ctx.device].nsm;
    const int splits  = std::max(1, std::min(at_once/(rows*shares), n_tiles/2));

    ggml_cuda_pool_alloc<int> tiles(ctx.pool(), (size_t) rows*n_tiles), counts(ctx.pool(), rows);
    ggml_cuda_pool_alloc<float>  parts(ctx.pool());
    ggml_cuda_pool_alloc<float2> meta(ctx.pool());
    if (splits > 1) {
        parts.alloc((size_t) splits*ggml_nelements(dst));
        meta.alloc((size_t) splits*ggml_nrows(dst));
    }
    const ggml_cuda_kernel_launch_params lists(dim3(rows), dim3(1024), n_tiles, stream);
    ggml_cuda_kernel_launch(list_tiles, lists, (const half *) mask->data, tiles.get(), counts.get(), n_tiles, l.mask_row);

    float scale;
    memcpy(&scale, dst->op_params, sizeof(float));
    constexpr auto kernel = attend<D, q8>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, (sizes<D, q8>::bytes));
    const ggml_cuda_kernel_launch_params params(dim3(rows, splits, shares), dim3(32, WARPS), sizes<D, q8>::bytes, stream);
    ggml_cuda_kernel_launch(kernel, params, (const char *) Q->data, (const char *) K->data, (const char *) V->data,
        (const half *) mask->data, (const int *) tiles.get(), (const int *) counts.get(),
        splits > 1 ? parts.ptr : (float *) dst->data, meta.ptr, scale, l);
    if (splits > 1) {
        const ggml_cuda_kernel_launch_params combine(dim3(rows, l.heads, 1), dim3(D), splits*sizeof(float2), stream);
        ggml_cuda_kernel_launch(flash_attn_combine_results<D>, combine, (const float *) parts.ptr, (const float2 *) meta.ptr,
            (float *) dst->data, splits);
    }
}

void kvf_attend(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const auto launch = [&](auto D) {
        if (dst->src[1]->type == GGML_TYPE_F16) {
            attend_heads<D(), false>(ctx, dst);
        } else {
            attend_heads<D(), true>(ctx, dst);
        }
    };
    switch (dst->src[0]->ne[0]) {
        case 64:  launch(std::integral_constant<int, 64>());  break;
        case 128: launch(std::integral_constant<int, 128>()); break;
        default:  launch(std::integral_constant<int, 256>()); break;
    }
}
