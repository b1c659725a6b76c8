// The context of a drafter: one of stock llama.cpp, which takes rows beside tokens.
#include "kvf_error.h"
#include "kvf_pool.h"

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

#include <cstring>
#include <exception>

namespace {

// llama.cpp ends the process for a batch that is too long.
kvf_status check(const llama_context & ctx, int32_t n, const int32_t * token, const float * rows) {
    const int32_t most = ctx.n_ubatch();
    if (n <= 0 || n > most) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d tokens for a drafter, it takes 1 to %d at once", n, most);
    }
    if (!token && !rows) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "neither tokens nor rows for a drafter");
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status fill(llama_batch_ext & batch, int32_t n, const int32_t * token, const float * rows, int32_t width,
                const int32_t * pos, int32_t n_outputs) {
    for (int32_t i = 0; i < n; ++i) {
        batch.add_token(0);
        if (token && !batch.set_token_id(i, token[i])) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "token %d for a drafter is %d, its vocabulary has %d", i, token[i],
                            batch.n_vocab);
        }
        if (rows && !batch.set_token_embd(i, { rows + (int64_t) i*width, 1, (size_t) width })) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "rows of %d values for a drafter, it takes %zu", width, batch.n_embd_inp);
        }
        const llama_pos where[4] = { pos[i], pos[i], pos[i], 0 };
        batch.set_token_pos(i, where);
        batch.set_output(i, i >= n - n_outputs);
    }
    return KVF_STATUS_SUCCESS;
}

}  // namespace

int kvf_draft_head(const void * model_ptr) {
    const auto & model = *(const llama_model *) model_ptr;
    const size_t il    = model.hparams.n_layer();
    return model.hparams.n_layer_nextn > 0 && il < model.layers.size() && model.layers[il].nextn.eh_proj != nullptr;
}

kvf_status kvf_draft_open(void * ctx_ptr, int32_t nextn, int32_t causal) {
    auto & ctx = *(llama_context *) ctx_ptr;
    if (nextn) {
        llama_set_embeddings_nextn(&ctx, true, nextn == 1);
    }
    llama_set_causal_attn(&ctx, causal);
    try {
        kvf_access::reserve(ctx);
        return KVF_STATUS_SUCCESS;
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory for a drafter's compute: %s", err.what());
    }
}

kvf_status kvf_draft_run(void * ctx_ptr, int32_t encode, int32_t n, const int32_t * token, const float * rows, int32_t width,
                         const int32_t * pos, int32_t n_outputs) {
    auto & ctx = *(llama_context *) ctx_ptr;
    if (const auto status = check(ctx, n, token, rows)) {
        return status;
    }
    try {
        llama_batch_ext batch(&ctx);
        if (const auto status = fill(batch, n, token, rows, width, pos, n_outputs)) {
            return status;
        }
        const int code = encode ? ctx.encode(batch) : ctx.decode(batch);
        return code == 0 ? KVF_STATUS_SUCCESS
                         : kvf_fail(KVF_STATUS_DECODE, "llama.cpp returned %d for %d tokens of a drafter", code, n);
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_DECODE, "%d tokens of a drafter failed: %s", n, err.what());
    }
}

kvf_status kvf_draft_states(void * ctx_ptr, int32_t n, int32_t width, float * out) {
    auto & ctx = *(llama_context *) ctx_ptr;
    const int32_t made = ctx.get_model().hparams.n_embd_out();
    if (width != made) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "states of %d values, a drafter's have %d", width, made);
    }
    const float * rows = llama_get_embeddings_nextn(&ctx);
    if (!rows || n < 0 || n > (int32_t) ctx.n_ubatch()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no states of %d tokens: a drafter's context was not opened for them", n);
    }
    memcpy(out, rows, (size_t) n*width*sizeof(float));
    return KVF_STATUS_SUCCESS;
}
