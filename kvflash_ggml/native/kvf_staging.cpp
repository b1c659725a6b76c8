// Pages through a staging area on the device. In at the speed of the bus: one copy per image, one scatter per span for all of
// them. Out of a server, where every read is a round trip: one gather per span, and then whole images.
#include "kvf_engine.h"

#include <algorithm>

namespace {

constexpr int64_t STAGED_PAGES = 8;

// The bytes of a cache tensor, as rows of one block each. F32 stands for four bytes: set_rows copies them as they are.
ggml_tensor * as_blocks(ggml_context * ctx, const kvf_lane::span & s, int32_t n_blocks) {
    auto * res = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.size/sizeof(float), n_blocks);
    ggml_backend_tensor_alloc(s.tensor->buffer, res, s.tensor->data);
    return res;
}

// Lay a tensor of n rows over the same span of the first n staged pages.
void place(const kvf_lane & lane, ggml_tensor * rows, const kvf_lane::span & s) {
    const auto * pages = lane.stage->pages;
    rows->nb[1] = pages->nb[1];
    rows->nb[2] = rows->nb[3] = rows->ne[1]*rows->nb[1];
    ggml_backend_tensor_alloc(lane.stage->buffer.get(), rows, (char *) pages->data + s.offset - lane.share_offset);
}

ggml_tensor * scatter(ggml_context * ctx, const kvf_lane & lane, size_t i, ggml_tensor * index) {
    auto * rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, lane.spans[i].size/sizeof(float), index->ne[0]);
    place(lane, rows, lane.spans[i]);
    auto * op = ggml_set_rows(ctx, lane.stage->blocks[i], rows, index);
    ggml_backend_view_init(op);
    return op;
}

ggml_tensor * gather(ggml_context * ctx, const kvf_lane & lane, size_t i, ggml_tensor * index) {
    auto * op = ggml_get_rows(ctx, lane.stage->blocks[i], index);
    place(lane, op, lane.spans[i]);
    return op;
}

using spreading = ggml_tensor * (ggml_context * ctx, const kvf_lane & lane, size_t span, ggml_tensor * index);

// All spans of the first n staged pages, and of the blocks that the index names.
void compute(const kvf_lane & lane, int64_t n, spreading * spread) {
    const size_t n_ops = lane.spans.size();
    ggml_context_ptr ctx { ggml_init({ 4*n_ops*ggml_tensor_overhead() + ggml_graph_overhead_custom(4*n_ops, false),
                                       nullptr, /*.no_alloc =*/ true }) };
    auto * graph = ggml_new_graph_custom(ctx.get(), 4*n_ops, false);
    auto * index = ggml_view_1d(ctx.get(), lane.stage->index, n, 0);
    ggml_backend_view_init(index);
    for (size_t i = 0; i < n_ops; ++i) {
        ggml_build_forward_expand(graph, spread(ctx.get(), lane, i, index));
    }
    ggml_backend_graph_compute_async(lane.copy.get(), graph);
}

bool can_scatter(const kvf_lane & lane) {
    ggml_context_ptr ctx { ggml_init({ 4*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    return ggml_backend_supports_op(lane.copy.get(), scatter(ctx.get(), lane, 0, ggml_view_1d(ctx.get(), lane.stage->index, 1, 0)));
}

}  // namespace

void kvf_staging_init(kvf_lane & lane, int32_t n_blocks) {
    if (std::any_of(lane.spans.begin(), lane.spans.end(), [](const auto & s) { return s.size % sizeof(float) != 0; })) {
        return;
    }
    auto stage = std::make_unique<kvf_lane::staging>();
    stage->ctx.reset(ggml_init({ (lane.spans.size() + 2)*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx = stage->ctx.get();
    stage->pages = ggml_new_tensor_2d(ctx, GGML_TYPE_I8, lane.share_bytes, STAGED_PAGES);
    stage->index = ggml_new_tensor_1d(ctx, lane.mode == KVF_MODE_REMOTE ? GGML_TYPE_I32 : GGML_TYPE_I64, STAGED_PAGES);
    auto * buft = ggml_backend_buffer_get_type(lane.spans[0].tensor->buffer);
    stage->buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!stage->buffer) {
        return;  // paging still works without it, only slower
    }
    for (const auto & s : lane.spans) {
        stage->blocks.push_back(as_blocks(ctx, s, n_blocks));
    }
    lane.stage = std::move(stage);
    if (lane.mode == KVF_MODE_STREAM && !can_scatter(lane)) {
        lane.stage.reset();
    }
}

void kvf_staging_page_in(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image, int64_t * rows) {
    const auto & stage = *lane.stage;
    const size_t size  = stage.pages->nb[1];
    std::copy(block, block + n, rows);
    for (int32_t i = 0; i < n; i += STAGED_PAGES) {
        const int64_t m = std::min<int64_t>(STAGED_PAGES, n - i);
        for (int64_t j = 0; j < m; ++j) {
            const auto * page = (const uint8_t *) (uintptr_t) image[i + j] + lane.share_offset;
            ggml_backend_tensor_set_async(lane.copy.get(), stage.pages, page, j*size, size);
        }
        ggml_backend_tensor_set_async(lane.copy.get(), stage.index, rows + i, 0, m*sizeof(rows[0]));
        compute(lane, m, scatter);
    }
}

void kvf_staging_page_out(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image) {
    const auto & stage = *lane.stage;
    const size_t size  = stage.pages->nb[1];
    for (int32_t i = 0; i < n; i += STAGED_PAGES) {
        const int64_t m = std::min<int64_t>(STAGED_PAGES, n - i);
        ggml_backend_tensor_set_async(lane.copy.get(), stage.index, block + i, 0, m*sizeof(block[0]));
        compute(lane, m, gather);
        for (int64_t j = 0, k = 1; j < m; j += k, k = 1) {
            while (j + k < m && image[i + j + k] == image[i + j] + k*size) {
                ++k;  // side by side, where the share is all of an image
            }
            auto * page = (uint8_t *) (uintptr_t) image[i + j] + lane.share_offset;
            ggml_backend_tensor_get_async(lane.copy.get(), stage.pages, page, j*size, k*size);
        }
    }
}
