// What the target computes on the way and drafters are given: inputs of layers, and the state in front of the head.
#include "kvf_engine.h"
#include "kvf_error.h"

#include "llama-ext.h"
#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <exception>

namespace {

// Behind the last layer there is an input only where a graph is asked for it, so none that was built before tells.
bool gives_last_input(llm_arch arch) {
    return arch == LLM_ARCH_MIMO2 || arch == LLM_ARCH_NEMOTRON_H || arch == LLM_ARCH_NEMOTRON_H_MOE;
}

// llama.cpp ends the process when it is asked for what a graph does not set: the graph that its memory was reserved
// with tells before. Rows are copied from the start of a tensor, one a token.
bool is_row(const ggml_tensor * t, int64_t width) {
    return t && t->type == GGML_TYPE_F32 && t->ne[0] == width && ggml_is_contiguous(t);
}

kvf_status check_layer(llama_context & ctx, int32_t il) {
    const auto &  model   = ctx.get_model();
    const int32_t n_layer = model.hparams.n_layer();
    if (il < 0 || il > n_layer) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the input of layer %d, the model has %d layers", il, n_layer);
    }
    const bool given = il < n_layer ? is_row(ctx.get_gf_res_reserve()->get_layer_inp(il), model.hparams.n_embd)
                                    : gives_last_input(model.arch);
    if (!given) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "llama.cpp does not hand out the input of layer %d of the architecture %s",
                        il, llm_arch_name(model.arch));
    }
    return KVF_STATUS_SUCCESS;
}

bool computes_nextn(llama_context & ctx) {
    return ctx.pooling_type() == LLAMA_POOLING_TYPE_NONE
        && is_row(ctx.get_gf_res_reserve()->get_h_nextn(), ctx.get_model().hparams.n_embd_out());
}

void want(kvf_engine & engine, bool value) {
    auto & features = engine.features;
    for (const auto il : features.layers) {
        llama_set_embeddings_layer_inp(&engine.ctx, il, value);
    }
    if (features.nextn) {
        llama_set_embeddings_nextn(&engine.ctx, value, /*masked*/ false);
    }
}

kvf_status give_up(kvf_engine & engine, kvf_status status) {
    want(engine, false);
    engine.features = {};
    return status;
}

}  // namespace

// Plans the memory of graphs anew, with what is to be kept.
void kvf_access::reserve(llama_context & ctx) {
    ctx.sched_need_reserve = true;
    ctx.sched_reserve();
}

kvf_status kvf_features_open(kvf_engine * engine, int32_t n_layers, const int32_t * layer, int32_t nextn, int32_t * width) {
    auto & features = engine->features;
    if (features.width) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "features are kept already: %d values a token", features.width);
    }
    for (int32_t i = 0; i < n_layers; ++i) {
        if (std::find(layer, layer + i, layer[i]) != layer + i) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "the input of layer %d is named twice", layer[i]);
        }
        if (const auto status = check_layer(engine->ctx, layer[i])) {
            return status;
        }
    }
    const auto & hparams = engine->ctx.get_model().hparams;
    features.layers.assign(layer, layer + n_layers);
    features.nextn = nextn;
    try {
        want(*engine, true);
        kvf_access::reserve(engine->ctx);
        if (nextn && !computes_nextn(engine->ctx)) {
            return give_up(*engine, kvf_fail(KVF_STATUS_UNSUPPORTED, "llama.cpp does not hand out the state in front of the "
                                             "head of the architecture %s", llm_arch_name(engine->ctx.get_model().arch)));
        }
    } catch (const std::exception & err) {
        return give_up(*engine, kvf_fail(KVF_STATUS_MEMORY, "no memory to compute with features kept: %s", err.what()));
    }
    features.width = n_layers*hparams.n_embd + (nextn ? hparams.n_embd_out() : 0);
    *width = features.width;
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_features_read(kvf_engine * engine, int32_t first, int32_t n, float * out) {
    const auto & features = engine->features;
    if (features.width == 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "no features are kept: kvf_features_open names them");
    }
    if (first < 0 || n < 0 || n > features.n_rows - first) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "features of %d tokens from %d on, of a step of %d", n, first, features.n_rows);
    }
    const auto & hparams = engine->ctx.get_model().hparams;
    const auto   copy    = [&](const float * rows, int64_t size) {
        for (int32_t i = 0; i < n; ++i) {
            memcpy(out + (int64_t) i*features.width, rows + (first + i)*size, size*sizeof(float));
        }
        out += size;
    };
    for (const auto il : features.layers) {  // these wait for the compute
        copy(llama_get_embeddings_layer_inp(&engine->ctx, il), hparams.n_embd);
    }
    if (features.nextn) {
        copy(llama_get_embeddings_nextn(&engine->ctx), hparams.n_embd_out());
    }
    return KVF_STATUS_SUCCESS;
}
