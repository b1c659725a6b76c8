// Page-in at the speed of the bus: one copy per image into a staging area, one scatter per span for all of them.
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

// The same span of the first n staged pages.
ggml_tensor * staged_span(ggml_context * ctx, const kvf_lane::staging & stage, const kvf_lane::span & s, size_t first, int64_t n) {
    auto * res = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.size/sizeof(float), n);
    res->nb[1] = stage.pages->nb[1];
    ggml_backend_tensor_alloc(stage.buffer.get(), res, (char *) stage.pages->data + s.offset - first);
    return res;
}

void scatter(const kvf_lane & lane, int64_t n) {
    const auto & stage = *lane.stage;
    const size_t n_ops = lane.spans.size();
    ggml_context_ptr ctx { ggml_init({ 4*n_ops*ggml_tensor_overhead() + ggml_graph_overhead_custom(4*n_ops, false),
                                       nullptr, /*.no_alloc =*/ true }) };
    auto * graph = ggml_new_graph_custom(ctx.get(), 4*n_ops, false);
    auto * index = ggml_view_1d(ctx.get(), stage.index, n, 0);
    ggml_backend_view_init(index);
    for (size_t i = 0; i < n_ops; ++i) {
        auto * rows = staged_span(ctx.get(), stage, lane.spans[i], lane.share_offset, n);
        auto * op   = ggml_set_rows(ctx.get(), stage.blocks[i], rows, index);
        ggml_backend_view_init(op);
        ggml_build_forward_expand(graph, op);
    }
    ggml_backend_graph_compute_async(lane.copy.get(), graph);
}

bool can_scatter(const kvf_lane & lane, const kvf_lane::staging & stage) {
    ggml_context_ptr ctx { ggml_init({ 4*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    auto * rows = staged_span(ctx.get(), stage, lane.spans[0], lane.share_offset, 1);
    auto * op   = ggml_set_rows(ctx.get(), stage.blocks[0], rows, ggml_view_1d(ctx.get(), stage.index, 1, 0));
    return ggml_backend_supports_op(lane.copy.get(), op);
}

}  // namespace

std::unique_ptr<kvf_lane::staging> kvf_staging_init(const kvf_lane & lane, int32_t n_blocks) {
    if (std::any_of(lane.spans.begin(), lane.spans.end(), [](const auto & s) { return s.size % sizeof(float) != 0; })) {
        return nullptr;
    }
    auto res = std::make_unique<kvf_lane::staging>();
    res->ctx.reset(ggml_init({ (lane.spans.size() + 2)*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx = res->ctx.get();
    res->pages = ggml_new_tensor_2d(ctx, GGML_TYPE_I8, lane.share_bytes, STAGED_PAGES);
    res->index = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, STAGED_PAGES);
    auto * buft = ggml_backend_buffer_get_type(lane.spans[0].tensor->buffer);
    res->buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!res->buffer) {
        return nullptr;  // paging still works without it, only slower
    }
    for (const auto & s : lane.spans) {
        res->blocks.push_back(as_blocks(ctx, s, n_blocks));
    }
    return can_scatter(lane, *res) ? std::move(res) : nullptr;
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
        scatter(lane, m);
    }
}
