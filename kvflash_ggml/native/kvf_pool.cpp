#include "kvf_stage.h"

#include "llama-impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace {

struct pool_request {
    uint32_t cells      = 0;
    uint32_t query_rows = 0;
};

// llama_context_params is passed by value from Python, so its layout cannot carry the request
thread_local pool_request next_pool;

}  // namespace

void kvf_set_pool(uint32_t cells, uint32_t query_rows) {
    next_pool = { cells, query_rows };
}

std::shared_ptr<kvf_pool> kvf_pool_create(llama_kv_cache & kv, uint32_t & kv_size) {
    if (next_pool.cells == 0) {
        return nullptr;
    }
    if (kv.get_n_stream() != 1) {
        throw std::runtime_error("a pool is one stream of cells: n_seq_max above 1 needs kv_unified");
    }
    // several sequences share the pool, and each of them can be as long as the context
    kv_size = kv.get_n_seq_max() > 1 ? next_pool.cells : std::min(kv_size, next_pool.cells);
    return std::make_shared<kvf_pool>(kv, next_pool.query_rows);
}

bool kvf_plan_slots(kvf_pool & pool, const llama_ubatch & ubatch, llama_kv_cache::slot_info & res) {
    const auto * plan = pool.plan;
    if (!plan) {
        LLAMA_LOG_ERROR("%s: this context is paged: it can only be decoded through its session\n", __func__);
        return false;
    }
    // batch_idxs maps back to the caller's batch however the memory has split it
    const auto & from = ubatch.data->batch_idxs;
    res.s0      = 0;
    res.s1      = 0;
    res.strm[0] = 0;
    res.idxs[0].resize(from.size());
    pool.ubatch_tokens = from.size();
    for (size_t i = 0; i < from.size(); ++i) {
        res.idxs[0][i] = plan->slot[from[i]];
    }
    return true;
}

bool kvf_plan_mask(const kvf_pool & pool, ggml_tensor * dst, const llama_ubatch * ubatch) {
    const auto * plan = pool.plan;
    if (!plan) {
        return false;
    }
    const auto & from   = ubatch->data->batch_idxs;
    const size_t stride = plan->mask_stride*ggml_type_size(dst->type);
    if (dst->op != GGML_OP_NONE) {
        dst = pool.stages->mask_tail;  // what comes before it is visible to all
    } else {
        dst->op_params[0] = pool.view.first;  // the keys of this graph begin there
    }
    GGML_ASSERT(ggml_backend_buffer_is_host(dst->buffer));
    const size_t width  = dst->nb[1];
    const auto * rows   = (const char *) plan->mask + pool.view.first*ggml_type_size(dst->type);
    auto *       data   = (char *) dst->data;
    for (size_t i = 0; i < from.size(); ++i) {
        memcpy(data + i*width, rows + from[i]*stride, width);
    }
    return true;
}
