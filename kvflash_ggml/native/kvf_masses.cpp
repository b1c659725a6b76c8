#include "kvf_masses.h"

#include "kvf_error.h"
#include "kvf_stage.h"

#include <algorithm>

namespace {

constexpr int64_t AT_ONCE   = 1 << 20;  // scores of one piece: they stay in a device's cache, and so small is the room for them
constexpr float   LEAST     = 1e-37f;   // share of a key that has none: its logarithm is a number
constexpr int64_t N_TENSORS = 14;      // of a piece, at most

// The captured queries of some heads of a layer that read one KV head: columns [first, first + count) of all.
struct column_group {
    int32_t kv_head;
    int64_t first;
    int64_t count;
};

std::vector<column_group> groups_of(const kvf_engine & engine, const kvf_plan & plan, size_t layer) {
    const auto & l = engine.layers[layer];
    std::vector<column_group> res;
    for (int32_t i = 0; i < plan.n_mass_heads; ++i) {
        if (plan.mass_heads[i].layer != (int32_t) layer) {
            continue;
        }
        const auto kv_head = plan.mass_heads[i].head/(l.n_head/l.n_head_kv);
        if (res.empty() || res.back().kv_head != kv_head) {
            res.push_back({ kv_head, (int64_t) i*plan.n_mass_rows, 0 });
        }
        res.back().count += plan.n_mass_rows;
    }
    return res;
}

// Texts grow: memory is made in steps, or each longer one would ask for a little more.
bool make_memory(const kvf_engine & engine, const kvf_lane & lane, kvf_masses::part & part, int64_t n_chunks) {
    const auto size = GGML_PAD(part.count*n_chunks, AT_ONCE);
    if (part.out && part.index->ne[0] >= part.count && part.out->ne[0] >= size) {
        return true;
    }
    part.out = nullptr;
    part.buffer.reset();
    part.ctx.reset(ggml_init({ 2*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }));
    auto * buft  = ggml_backend_buffer_get_type(kvf_access::layers(engine.kv)[lane.first_layer].k->buffer);
    auto * index = ggml_new_tensor_1d(part.ctx.get(), GGML_TYPE_I32, part.count);
    auto * out   = ggml_new_tensor_1d(part.ctx.get(), GGML_TYPE_F32, size);
    part.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(part.ctx.get(), buft));
    if (!part.buffer) {
        return false;
    }
    part.index = index;
    part.out   = out;
    if (!part.scratch) {
        part.scratch.reset(ggml_gallocr_new(buft));
    }
    return true;
}

// Why a device does not compute masses, or nothing.
std::string refuses(const kvf_lane & lane) {
    const std::string name = ggml_backend_dev_name(lane.dev);
    if (lane.mode == KVF_MODE_REMOTE) {  // it says yes to all, and an operation that is not there would end the server
        return name + " is behind a network, where no operation can be asked for";
    }
    return lane.compute ? "" : "the context computes nothing on " + name + ", which holds keys";
}

// Of a piece of a stage: per column and chunk the logarithm of the sum of exp(scale*q*k).
//
// The share of a key is p = exp(s)/sum, so the logarithm of the sum is s - log(p) for each key of a chunk, and the mean of
// that by p. This way no maximum is needed, which not every backend can take of 64 values.
ggml_tensor * log_masses(ggml_context * ctx, ggml_tensor * keys, ggml_tensor * queries, float scale) {
    auto * products = ggml_mul_mat(ctx, keys, queries);
    ggml_prec_set_acc(products, GGML_PREC_F32);
    auto * scores = ggml_reshape_2d(ctx, products, KVF_BLOCK, ggml_nelements(products)/KVF_BLOCK);
    auto * shares = ggml_soft_max_ext(ctx, scores, nullptr, scale, 0.0f);
    auto * logs   = ggml_log(ctx, ggml_scale_bias(ctx, shares, 1.0f, LEAST));
    auto * masses = ggml_sub(ctx, ggml_scale(ctx, scores, scale), logs);
    return ggml_sum_rows(ctx, ggml_mul(ctx, masses, shares));
}

// The graph of one layer, or null: why says which operation its device does not have.
ggml_cgraph * build(kvf_engine & engine, kvf_masses & masses, const kvf_masses::part & part, const kvf_lane & lane,
                    const std::vector<column_group> & groups, size_t layer, ggml_context_ptr & memory) {
    const auto & l = engine.layers[layer];
    const auto pieces_of = [&](const column_group & g) {
        const auto at_once = std::clamp<int64_t>(AT_ONCE/(g.count*KVF_BLOCK), 1, masses.n_chunks);
        return std::make_pair(at_once, (masses.n_chunks + at_once - 1)/at_once);
    };
    int64_t n_pieces = 0;
    for (const auto & g : groups) {
        n_pieces += pieces_of(g).second;
    }
    const size_t n_tensors = N_TENSORS*n_pieces + 4*groups.size();
    memory.reset(ggml_init({ n_tensors*ggml_tensor_overhead() + ggml_graph_overhead_custom(n_tensors, false), nullptr, true }));
    auto * ctx    = memory.get();
    auto * graph  = ggml_new_graph_custom(ctx, n_tensors, false);
    auto & query  = engine.pool.queries.at(l.il);
    auto * stage  = engine.pool.stages->layers[layer].k;
    auto * asked  = ggml_reshape_2d(ctx, query.rows, l.head_k, ggml_nelements(query.rows)/l.head_k);
    for (const auto & g : groups) {
        const auto first   = g.first - part.first;
        auto *     rows    = ggml_view_1d(ctx, part.index, g.count, first*part.index->nb[0]);
        auto *     queries = ggml_get_rows(ctx, asked, rows);
        const auto at_once = pieces_of(g).first;
        for (int64_t c = 0; c < masses.n_chunks; c += at_once) {
            const auto n    = std::min(at_once, masses.n_chunks - c);
            const auto head = g.kv_head*ggml_row_size(stage->type, l.head_k);
            auto * keys = ggml_view_2d(ctx, stage, l.head_k, n*KVF_BLOCK, stage->nb[1], c*KVF_BLOCK*stage->nb[1] + head);
            auto * mass = ggml_reshape_2d(ctx, log_masses(ctx, keys, queries, query.scale), n, g.count);
            auto * to   = ggml_view_2d(ctx, part.out, n, g.count, masses.n_chunks*sizeof(float),
                                       (first*masses.n_chunks + c)*sizeof(float));
            ggml_build_forward_expand(graph, ggml_cpy(ctx, mass, to));
        }
    }
    for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
        const auto * node = ggml_graph_node(graph, i);
        if (!ggml_backend_supports_op(lane.compute, node)) {
            masses.why = std::string(ggml_backend_dev_name(lane.dev)) + " has no " + ggml_op_desc(node) + " for it";
            return nullptr;
        }
    }
    return graph;
}

}  // namespace

kvf_status kvf_masses_check(const kvf_engine & engine, const kvf_plan & plan) {
    if (plan.n_mass_heads == 0) {
        return KVF_STATUS_SUCCESS;
    }
    if (plan.n_mass_rows <= 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "masses for %d rows of queries", plan.n_mass_rows);
    }
    for (int32_t i = 0; i < plan.n_mass_rows; ++i) {
        if (plan.mass_row[i] < 0 || plan.mass_row[i] >= engine.info.query_rows) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "masses for row %d of %d of queries", plan.mass_row[i],
                            engine.info.query_rows);
        }
    }
    return kvf_check_heads(engine.layers, plan.n_mass_heads, plan.mass_heads, &kvf_layer::n_head);
}

void kvf_masses_begin(kvf_engine & engine, const kvf_plan & plan) {
    auto & masses = engine.pool.stages->masses;
    const auto n_rows = (int64_t) plan.n_streamed*KVF_BLOCK + plan.open_rows + plan.n_tokens;
    masses.n_heads  = plan.n_mass_heads;
    masses.n_rows   = plan.n_mass_rows;
    masses.n_chunks = n_rows/KVF_BLOCK;
    masses.n_done   = 0;
    masses.why      = plan.n_mass_heads == 0 ? "nobody asked the newest streamed step for it" : "";
    masses.index.clear();
    masses.parts.resize(engine.lanes.size());
    for (int32_t i = 0; i < plan.n_mass_heads; ++i) {
        const auto & head = plan.mass_heads[i];
        for (int32_t r = 0; r < plan.n_mass_rows; ++r) {
            masses.index.push_back(plan.mass_row[r]*engine.layers[head.layer].n_head + head.head);
        }
    }
    int32_t next = 0;
    for (size_t i = 0; i < engine.lanes.size() && masses.why.empty(); ++i) {
        const auto & lane = engine.lanes[i];
        auto &       part = masses.parts[i];
        part.first = (int64_t) next*plan.n_mass_rows;
        while (next < plan.n_mass_heads && plan.mass_heads[next].layer < lane.first_layer + lane.n_layers) {
            ++next;
        }
        part.count = (int64_t) next*plan.n_mass_rows - part.first;
        if (part.count == 0) {
            continue;
        }
        masses.why = refuses(lane);
        if (masses.why.empty() && !make_memory(engine, lane, part, masses.n_chunks)) {
            masses.why = std::string("no memory on ") + ggml_backend_dev_name(lane.dev) + " for it";
        }
        if (masses.why.empty()) {
            kvf_lane_set(lane, part.index, masses.index.data() + part.first, 0, part.count*sizeof(int32_t));
        }
    }
}

void kvf_masses_submit(kvf_engine & engine, const kvf_plan & plan, size_t layer) {
    auto & masses = engine.pool.stages->masses;
    if (!masses.why.empty()) {
        return;
    }
    const auto groups = groups_of(engine, plan, layer);
    if (groups.empty()) {
        return;
    }
    auto & lane = engine.lanes[engine.layers[layer].device];
    auto & part = masses.parts[engine.layers[layer].device];
    ggml_context_ptr ctx;
    auto * graph = build(engine, masses, part, lane, groups, layer, ctx);
    if (!graph) {
        return;
    }
    if (!ggml_gallocr_alloc_graph(part.scratch.get(), graph)) {
        masses.why = std::string("no memory on ") + ggml_backend_dev_name(lane.dev) + " to compute it";
        return;
    }
    if (ggml_backend_graph_compute_async(lane.compute, graph) != GGML_STATUS_SUCCESS) {
        masses.why = std::string(ggml_backend_dev_name(lane.dev)) + " failed to compute it";
        return;
    }
    for (const auto & g : groups) {
        masses.n_done += g.count/masses.n_rows;
    }
}

int64_t kvf_masses_bytes(const kvf_engine * engine, int32_t device) {
    const auto * stages = engine->pool.stages.get();
    if (!stages || device < 0 || device >= (int32_t) stages->masses.parts.size()) {
        return 0;
    }
    const auto & part = stages->masses.parts[device];
    return (part.buffer ? ggml_backend_buffer_get_size(part.buffer.get()) : 0)
         + (part.scratch ? ggml_gallocr_get_buffer_size(part.scratch.get(), 0) : 0);
}

kvf_status kvf_masses_read(kvf_engine * engine, float * out, int64_t size, uint64_t * ticket) {
    const auto * stages = engine->pool.stages.get();
    if (!stages || !stages->masses.why.empty() || stages->masses.n_done < stages->masses.n_heads) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "%s", !stages ? "there are no stages"
                        : stages->masses.why.empty() ? "the newest streamed step has failed" : stages->masses.why.c_str());
    }
    const auto & masses = stages->masses;
    const auto   n      = masses.n_heads*masses.n_rows*masses.n_chunks;
    if (size != n) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %lld masses, there are %lld", (long long) size, (long long) n);
    }
    *ticket = engine->tickets.begin(engine->lanes);
    for (size_t i = 0; i < masses.parts.size(); ++i) {
        const auto & part = masses.parts[i];
        if (part.count > 0) {
            kvf_lane_follow(*engine, engine->lanes[i]);
            kvf_lane_get(engine->lanes[i], part.out, out + part.first*masses.n_chunks, 0,
                         part.count*masses.n_chunks*sizeof(float));
        }
    }
    engine->tickets.end(engine->lanes);
    engine->compute_barrier = *ticket;
    return KVF_STATUS_SUCCESS;
}
