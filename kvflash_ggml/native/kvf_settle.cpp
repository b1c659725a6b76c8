// Rows move between slots of the pool: the accepted path of a tree goes to its place.
#include "kvf_engine.h"
#include "kvf_error.h"

#include <algorithm>

namespace {

struct move {
    int32_t from;
    int32_t to;
};

kvf_status check_moves(kvf_engine & engine, int32_t n, const int32_t * from, const int32_t * to) {
    if (engine.info.v_trans) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "V is stored transposed, so rows cannot move: use flash attention");
    }
    if (n < 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d rows to settle", n);
    }
    const auto & cells = kvf_access::cells(engine.kv);
    std::vector<bool> leaves(engine.info.n_slots), taken(engine.info.n_slots);
    for (int32_t i = 0; i < n; ++i) {
        for (const auto slot : { from[i], to[i] }) {
            if (slot < 0 || slot >= engine.info.n_slots) {
                return kvf_fail(KVF_STATUS_ARGUMENT, "row %d settles from slot %d in slot %d, there are %d", i, from[i],
                                to[i], engine.info.n_slots);
            }
        }
        if (cells.is_empty(from[i])) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "row %d settles from slot %d, which is empty", i, from[i]);
        }
        if (leaves[from[i]] || taken[to[i]]) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "row %d settles from slot %d in slot %d, as one before it", i, from[i],
                            to[i]);
        }
        leaves[from[i]] = taken[to[i]] = true;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (!leaves[to[i]] && !cells.is_empty(to[i])) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "row %d settles in slot %d, which is taken", i, to[i]);
        }
    }
    return KVF_STATUS_SUCCESS;
}

// The bytes of a cache tensor, as rows of one token each. F32 stands for four bytes, as in kvf_staging.cpp.
ggml_tensor * as_rows(ggml_context * ctx, const kvf_lane::span & s, int32_t n_slots) {
    auto * res = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.size/KVF_BLOCK/sizeof(float), n_slots);
    ggml_backend_tensor_alloc(s.tensor->buffer, res, s.tensor->data);
    return res;
}

// One graph for all layers of a device: of each tensor first everything is read, then everything is written. False if the
// device cannot do that.
bool move_by_graph(kvf_engine & engine, kvf_lane & lane, const std::vector<move> & moves) {
    auto * backend = lane.copy.get();
    if (!backend || std::any_of(lane.spans.begin(), lane.spans.end(),
                                [](const auto & s) { return s.size % (KVF_BLOCK*sizeof(float)) != 0; })) {
        return false;
    }
    const size_t n_nodes = 2*lane.spans.size();
    ggml_context_ptr ctx { ggml_init({ (2*n_nodes + 2)*ggml_tensor_overhead() + ggml_graph_overhead_custom(2*n_nodes, false),
                                       nullptr, /*.no_alloc =*/ true }) };
    auto * from  = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I32, moves.size());
    auto * to    = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I64, moves.size());
    auto * graph = ggml_new_graph_custom(ctx.get(), 2*n_nodes, false);
    ggml_set_input(from);
    ggml_set_input(to);
    for (const auto & s : lane.spans) {
        auto * rows = as_rows(ctx.get(), s, engine.info.n_slots);
        auto * read = ggml_get_rows(ctx.get(), rows, from);
        auto * done = ggml_set_rows(ctx.get(), rows, read, to);
        if (!ggml_backend_supports_op(backend, read) || !ggml_backend_supports_op(backend, done)) {
            return false;
        }
        ggml_build_forward_expand(graph, done);
    }
    if (!lane.rows) {
        lane.rows.reset(ggml_gallocr_new(ggml_backend_buffer_get_type(lane.spans[0].tensor->buffer)));
    }
    if (!ggml_gallocr_alloc_graph(lane.rows.get(), graph)) {
        return false;
    }
    auto * sources = engine.tickets.keep<int32_t>(moves.size());
    auto * targets = engine.tickets.keep<int64_t>(moves.size());
    for (size_t i = 0; i < moves.size(); ++i) {
        sources[i] = moves[i].from;
        targets[i] = moves[i].to;
    }
    ggml_backend_tensor_set_async(backend, from, sources, 0, ggml_nbytes(from));
    ggml_backend_tensor_set_async(backend, to, targets, 0, ggml_nbytes(to));
    ggml_backend_graph_compute_async(backend, graph);
    return true;
}

void move_by_bytes(const kvf_lane & lane, const std::vector<move> & moves) {
    std::vector<uint8_t> rows;
    for (const auto & s : lane.spans) {
        const size_t row = s.size/KVF_BLOCK;
        rows.resize(moves.size()*row);
        for (size_t i = 0; i < moves.size(); ++i) {
            ggml_backend_tensor_get(s.tensor, &rows[i*row], moves[i].from*row, row);
        }
        for (size_t i = 0; i < moves.size(); ++i) {
            ggml_backend_tensor_set(s.tensor, &rows[i*row], moves[i].to*row, row);
        }
    }
}

void move_rows(kvf_engine & engine, const std::vector<move> & moves) {
    engine.compute_barrier = engine.tickets.begin(engine.lanes);
    for (auto * lane : engine.by_mode) {
        kvf_lane_follow(engine, *lane);
        if (!move_by_graph(engine, *lane, moves)) {
            if (lane->copy) {
                ggml_backend_synchronize(lane->copy.get());
            }
            move_by_bytes(*lane, moves);
        }
    }
    engine.tickets.end(engine.lanes);
}

}  // namespace

kvf_status kvf_settle(kvf_engine * engine, int32_t n, const int32_t * from, const int32_t * to) {
    if (const auto status = check_moves(*engine, n, from, to)) {
        return status;
    }
    std::vector<move> moves;
    for (int32_t i = 0; i < n; ++i) {
        if (from[i] != to[i]) {
            moves.push_back({ from[i], to[i] });
        }
    }
    if (moves.empty()) {
        return KVF_STATUS_SUCCESS;
    }
    move_rows(*engine, moves);

    std::vector<uint32_t> sources, targets;
    auto & cells = kvf_access::cells(engine->kv);
    for (const auto & m : moves) {
        kvf_hold(*engine, cells.seq_get(m.from), m.to, 1);
        sources.push_back(m.from);
        targets.push_back(m.to);
    }
    const auto moved = cells.cp(sources);
    for (const auto slot : sources) {
        cells.rm(slot);
    }
    cells.set(targets, moved);
    return KVF_STATUS_SUCCESS;
}
