// Pages through a staging area on the device: one copy per image, and one scatter or gather for like spans of all of them. So
// pages move at the speed of the bus, and out of a server, where every read is a round trip, as whole images.
#include "kvf_engine.h"

#include <algorithm>
#include <cstdint>

namespace {

// A server's device may be able to address no more in one tensor (Vulkan), and the protocol has strides of 32 bits.
constexpr size_t REMOTE_EXTENT = 128u << 20;

// Does `next` lie behind the last span of the group, as far on the device and in an image as that one behind the one before?
bool goes_on(const kvf_lane::group & group, const kvf_lane::span & last, const kvf_lane::span & next) {
    const auto apart = (const char *) next.tensor->data - (const char *) last.tensor->data;
    return next.size == last.size && next.tensor->buffer == last.tensor->buffer && apart > 0 && apart % sizeof(float) == 0 &&
           (group.n == 1 || ((size_t) apart == group.apart && next.offset - last.offset == group.image_apart));
}

// Spans that one scatter or gather moves, at most `extent` bytes of the device. As a rule those are all K and all V of the layers,
// or both together.
std::vector<kvf_lane::group> group_spans(const std::vector<kvf_lane::span> & spans, size_t extent) {
    std::vector<kvf_lane::group> groups;
    std::vector<bool> taken(spans.size());
    for (size_t i = 0; i < spans.size(); ++i) {
        if (taken[i]) {
            continue;
        }
        kvf_lane::group group { spans[i] };
        for (size_t j = i + 1, last = i; j < spans.size(); ++j) {
            const size_t reach = (const char *) spans[j].tensor->data - (const char *) spans[i].tensor->data + ggml_nbytes(spans[j].tensor);
            if (!taken[j] && reach <= extent && goes_on(group, spans[last], spans[j])) {
                group.apart       = (const char *) spans[j].tensor->data - (const char *) spans[last].tensor->data;
                group.image_apart = spans[j].offset - spans[last].offset;
                group.n++;
                taken[j] = true;
                last     = j;
            }
        }
        groups.push_back(group);
    }
    return groups;
}

void set_strides(ggml_tensor * t, size_t row, size_t matrix) {
    t->nb[1] = row;
    t->nb[2] = matrix;
    t->nb[3] = t->ne[2]*matrix;
}

// The bytes of a group in the cache, as rows of one block each. F32 stands for four bytes, which are copied as they are.
ggml_tensor * blocks_of(ggml_context * ctx, const kvf_lane & lane, const kvf_lane::group & g) {
    auto * res = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, g.first.size/sizeof(float), lane.stage->n_blocks, g.n);
    set_strides(res, g.first.size, g.apart);
    ggml_backend_tensor_alloc(g.first.tensor->buffer, res, g.first.tensor->data);
    return res;
}

// Lay a tensor [.., n, spans] over the group's part of the first n staged pages.
void place(const kvf_lane & lane, ggml_tensor * rows, const kvf_lane::group & g) {
    const auto * pages = lane.stage->pages;
    set_strides(rows, pages->nb[1], g.image_apart);
    ggml_backend_tensor_alloc(lane.stage->buffer.get(), rows, (char *) pages->data + g.first.offset - lane.share_offset);
}

ggml_tensor * scatter(ggml_context * ctx, const kvf_lane & lane, const kvf_lane::group & g, ggml_tensor * index) {
    auto * rows = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, g.first.size/sizeof(float), index->ne[0], g.n);
    place(lane, rows, g);
    auto * op = ggml_set_rows(ctx, blocks_of(ctx, lane, g), rows, index);
    ggml_backend_view_init(op);
    return op;
}

ggml_tensor * gather(ggml_context * ctx, const kvf_lane & lane, const kvf_lane::group & g, ggml_tensor * index) {
    auto * repeated = ggml_new_tensor_2d(ctx, index->type, index->ne[0], g.n);
    set_strides(repeated, 0, 0);
    ggml_backend_tensor_alloc(lane.stage->buffer.get(), repeated, index->data);
    auto * op = ggml_get_rows(ctx, blocks_of(ctx, lane, g), repeated);
    place(lane, op, g);
    return op;
}

using spreading = ggml_tensor * (ggml_context * ctx, const kvf_lane & lane, const kvf_lane::group & g, ggml_tensor * index);

// Every group of the first n staged pages, and of the blocks that the index names.
ggml_cgraph * build(const kvf_lane & lane, int64_t n, spreading * spread, ggml_context_ptr & ctx) {
    const size_t n_nodes = 4*lane.stage->groups.size();
    ctx.reset(ggml_init({ (n_nodes + 1)*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_nodes, false), nullptr,
                          /*.no_alloc =*/ true }));
    auto * graph = ggml_new_graph_custom(ctx.get(), n_nodes, false);
    auto * index = ggml_view_1d(ctx.get(), lane.stage->index, n, 0);
    ggml_backend_view_init(index);
    for (const auto & g : lane.stage->groups) {
        ggml_build_forward_expand(graph, spread(ctx.get(), lane, g, index));
    }
    return graph;
}

void compute(const kvf_lane & lane, int64_t n, spreading * spread) {
    ggml_context_ptr ctx;
    ggml_backend_graph_compute_async(lane.copy.get(), build(lane, n, spread, ctx));
}

bool can(const kvf_lane & lane, spreading * spread) {
    ggml_context_ptr ctx;
    auto * graph = build(lane, 1, spread, ctx);
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        if (!ggml_backend_supports_op(lane.copy.get(), ggml_graph_node(graph, i))) {
            return false;
        }
    }
    return true;
}

}  // namespace

void kvf_staging_init(kvf_lane & lane, int32_t n_blocks) {
    if (std::any_of(lane.spans.begin(), lane.spans.end(), [](const auto & s) { return s.size % sizeof(float) != 0; })) {
        return;
    }
    auto stage = std::make_unique<kvf_lane::staging>();
    stage->n_blocks = n_blocks;
    stage->groups   = group_spans(lane.spans, lane.mode == KVF_MODE_REMOTE ? REMOTE_EXTENT : SIZE_MAX);
    stage->ctx.reset(ggml_init({ 2*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * ctx = stage->ctx.get();
    stage->pages = ggml_new_tensor_2d(ctx, GGML_TYPE_I8, lane.share_bytes, KVF_STAGED_PAGES);
    stage->index = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, KVF_STAGED_PAGES);
    auto * buft = ggml_backend_buffer_get_type(lane.spans[0].tensor->buffer);
    stage->buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(ctx, buft));
    if (!stage->buffer) {
        return;  // paging still works without it, only slower
    }
    lane.stage = std::move(stage);
    if (lane.mode == KVF_MODE_STREAM && !(can(lane, scatter) && can(lane, gather))) {
        lane.stage.reset();
    }
}

void kvf_staging_page_in(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image) {
    const auto & stage = *lane.stage;
    const size_t size  = stage.pages->nb[1];
    for (int32_t i = 0; i < n; ++i) {
        const auto * page = (const uint8_t *) (uintptr_t) image[i] + lane.share_offset;
        ggml_backend_tensor_set_async(lane.copy.get(), stage.pages, page, i*size, size);
    }
    ggml_backend_tensor_set_async(lane.copy.get(), stage.index, block, 0, n*sizeof(block[0]));
    compute(lane, n, scatter);
}

void kvf_staging_page_out(const kvf_lane & lane, int32_t n, const int32_t * block, const uint64_t * image) {
    const auto & stage = *lane.stage;
    const size_t size  = stage.pages->nb[1];
    ggml_backend_tensor_set_async(lane.copy.get(), stage.index, block, 0, n*sizeof(block[0]));
    compute(lane, n, gather);
    for (int32_t i = 0, k = 1; i < n; i += k, k = 1) {
        while (i + k < n && image[i + k] == image[i] + k*size) {
            ++k;  // side by side, where the share is all of an image
        }
        auto * page = (uint8_t *) (uintptr_t) image[i] + lane.share_offset;
        ggml_backend_tensor_get_async(lane.copy.get(), stage.pages, page, i*size, k*size);
    }
}
