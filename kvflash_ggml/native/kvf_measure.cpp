// What a model and a context would take, without making them.
#include "kvf_device.h"
#include "kvf_error.h"
#include "kvf_guard.h"
#include "kvf_pool.h"
#include "kvf_probe.h"
#include "kvf_state.h"

#include "llama-arch.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>

namespace {

// While this lives, what this thread logs is kept or dropped: loads that are no loads would confuse a reader. That of other
// threads goes where it went.
class private_log {
public:
    private_log() : thread(std::this_thread::get_id()) {
        llama_log_get(&callback, &user_data);
        llama_log_set(take, this);
    }
    ~private_log() { llama_log_set(callback, user_data); }
    private_log(const private_log &) = delete;

    // The errors, or this where there were none.
    const char * errors(const char * none) const { return text.empty() ? none : text.c_str(); }

private:
    static void take(ggml_log_level level, const char * line, void * self_ptr) {
        auto & self = *(private_log *) self_ptr;
        if (std::this_thread::get_id() != self.thread) {
            self.callback(level, line, self.user_data);
        } else if (level == GGML_LOG_LEVEL_ERROR) {
            std::string error = line;
            error.erase(error.find_last_not_of(" \n") + 1);
            self.text += (self.text.empty() ? "" : "; ") + error;
        }
    }

    const std::thread::id thread;
    ggml_log_callback     callback  = nullptr;
    void *                user_data = nullptr;
    std::string           text;
};

std::mutex one_at_a_time;  // where errors go is one for the process

// While this lives, contexts of a model have sizes but no memory, and this thread makes them with a pool.
class measuring {
public:
    measuring(llama_model & model, uint32_t cells, uint32_t query_rows) : model(model), was(model.hparams.no_alloc) {
        model.hparams.no_alloc = true;
        kvf_set_pool(cells, query_rows);
    }
    ~measuring() {
        kvf_set_pool(0, 0);
        model.hparams.no_alloc = was;
    }
    measuring(const measuring &) = delete;

private:
    llama_model & model;
    const bool    was;
};

struct free_context {
    void operator()(llama_context * ctx) const { llama_free(ctx); }
};

// Buffers that the CPU repacks weights for call themselves no host buffers; their memory is the host's all the same.
int32_t device_of(const llama_model & model, ggml_backend_buffer_type_t buft) {
    const int32_t host = model.devices.size();
    auto *        dev  = ggml_backend_buft_is_host(buft) ? nullptr : ggml_backend_buft_get_device(buft);
    const auto    it   = std::find_if(model.devices.begin(), model.devices.end(), [dev](const auto & d) { return d.dev == dev; });
    return dev && it != model.devices.end() ? it - model.devices.begin() : host;
}

int32_t device_of(const llama_model & model, const ggml_tensor * tensor) {
    return device_of(model, ggml_backend_buffer_get_type(tensor->buffer));
}

// As an allocator of that kind of buffer counts it.
int64_t size_in_buffer(const ggml_tensor * tensor) {
    auto * buft = ggml_backend_buffer_get_type(tensor->buffer);
    return GGML_PAD(ggml_backend_buft_get_alloc_size(buft, tensor), ggml_backend_buft_get_alignment(buft));
}

// llama_context::memory_breakdown() would count the weights too, which it cannot once a model with its data has no_alloc.
void sum_measured(const llama_context & ctx, const llama_model & model, kvf_need * needs) {
    if (const auto * memory = ctx.get_memory()) {
        for (const auto & [buft, size] : memory->memory_breakdown()) {
            needs[device_of(model, buft)].context += size;
        }
    }
    const auto & bufts = kvf_access::compute_buffers(ctx);
    const auto & sizes = kvf_access::compute_sizes(ctx);
    for (size_t i = 0; i < bufts.size(); ++i) {
        needs[device_of(model, bufts[i])].compute += sizes[i];
    }
}

void name_needs(const llama_model & model, kvf_need * needs) {
    for (size_t i = 0; i <= model.devices.size(); ++i) {
        needs[i] = {};
        const bool host = i == model.devices.size();
        snprintf(needs[i].device, sizeof(needs[i].device), "%s", host ? "CPU" : ggml_backend_dev_name(model.devices[i].dev));
    }
}

void sum_queries(const llama_context & ctx, const llama_model & model, kvf_need * needs) {
    const auto * pooled = kvf_find_pooled(ctx.get_memory());
    if (pooled && pooled->pool) {
        for (const auto & [il, query] : pooled->pool->queries) {
            needs[device_of(model, query.rows)].queries += size_in_buffer(query.rows);
        }
    }
}

void describe_cache(const llama_model & model, const llama_kv_cache & kv, bool pooled, kvf_layer_need * layers) {
    for (const auto & l : kvf_access::layers(kv)) {
        auto & need = layers[l.il];
        need.device   = device_of(model, l.k);
        need.k_values = l.k->ne[0];
        need.v_values = l.v ? l.v->ne[0] : 0;
        need.cells    = pooled ? 0 : kv.get_size();
        need.n_head   = pooled ? model.hparams.n_head(l.il) : 0;
        need.n_head_kv = pooled ? model.hparams.n_head_kv(l.il) : 0;
        need.query    = (int64_t) sizeof(float)*need.n_head*model.hparams.n_embd_head_k(l.il);
    }
}

void describe_layers(const llama_model & model, llama_memory_i * memory, kvf_layer_need * layers) {
    if (const auto * pooled = kvf_find_pooled(memory)) {
        describe_cache(model, *pooled, true, layers);
    }
    if (const auto * iswa = kvf_find_iswa(memory)) {
        describe_cache(model, *iswa->get_swa(), false, layers);
    }
    if (const auto * recurrent = kvf_find_recurrent(memory)) {
        for (const auto * tensors : { &recurrent->r_l, &recurrent->s_l, &recurrent->p_l }) {
            for (size_t il = 0; il < tensors->size(); ++il) {
                if (const auto * tensor = (*tensors)[il]) {
                    layers[il].device = device_of(model, tensor);
                    layers[il].state += ggml_nbytes(tensor);
                }
            }
        }
    }
}

int32_t layer_of(const std::string & name) {
    int32_t res = -1;
    return sscanf(name.c_str(), "blk.%d.", &res) == 1 ? res : -1;
}

int32_t kind_of(const llama_model & model, const std::string & name, const ggml_tensor * tensor) {
    if (layer_of(name) >= 0) {
        return name.find("exps.") != std::string::npos;
    }
    // where the two are tied they are one weight, and that of the output a copy if it lies elsewhere
    if (tensor == model.tok_embd) {
        return 2;
    }
    return tensor == model.output || name.compare(0, 6, "output") == 0 ? 3 : 0;
}

}  // namespace

kvf_status kvf_sketch_init(const char * path, const void * model_params, void ** model) {
    auto params = *(const llama_model_params *) model_params;
    params.no_alloc  = true;
    params.load_mode = LLAMA_LOAD_MODE_NONE;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    const private_log                 log;
    const kvf_guard                   guard;
    try {
        *model = llama_model_load_from_file(path, params);
        return *model ? KVF_STATUS_SUCCESS : kvf_fail(KVF_STATUS_ARGUMENT, "%s", log.errors("it is no model"));
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%s", err.what());
    }
}

void kvf_sketch_free(void * model) {
    llama_model_free((llama_model *) model);
}

int32_t kvf_model_n_devices(const void * model) {
    return ((const llama_model *) model)->devices.size() + 1;
}

kvf_status kvf_model_devices(const void * model, kvf_device * out, int32_t n) {
    const auto & devices = ((const llama_model *) model)->devices;
    if (n != (int32_t) devices.size()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices, there are %d", n, (int) devices.size());
    }
    for (int32_t i = 0; i < n; ++i) {
        out[i] = kvf_describe_device(devices[i].dev);
    }
    return KVF_STATUS_SUCCESS;
}

int32_t kvf_model_n_layers(const void * model) {
    return ((const llama_model *) model)->hparams.n_layer_all;
}

int32_t kvf_model_n_weights(const void * model) {
    return ((const llama_model *) model)->tensors_by_name.size();
}

kvf_status kvf_model_weights(const void * model_ptr, kvf_weight * out, int32_t n) {
    const auto & model = *(const llama_model *) model_ptr;
    if (n != kvf_model_n_weights(model_ptr)) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d weights, there are %d", n, kvf_model_n_weights(model_ptr));
    }
    for (const auto & [name, tensor] : model.tensors_by_name) {
        auto & weight = *out++;
        weight = {};
        snprintf(weight.name, sizeof(weight.name), "%s", name.c_str());
        weight.size   = size_in_buffer(tensor);
        weight.layer  = layer_of(name);
        weight.kind   = kind_of(model, name, tensor);
        weight.device = device_of(model, tensor);
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_measure(void * model_ptr, const void * context_params, uint32_t cells, uint32_t query_rows,
                       kvf_need * needs, int32_t n_devices, kvf_layer_need * layers, int32_t n_layers) {
    auto &       model  = *(llama_model *) model_ptr;
    const auto & params = *(const llama_context_params *) context_params;
    if (n_devices != kvf_model_n_devices(&model) || n_layers != kvf_model_n_layers(&model)) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices and %d layers, there are %d and %d", n_devices, n_layers,
                        kvf_model_n_devices(&model), kvf_model_n_layers(&model));
    }
    if (cells % 256) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "a pool of %u cells: it is a multiple of 256", cells);
    }
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    const private_log                 log;
    const kvf_guard                   guard;
    try {
        const auto      weights = model.memory_breakdown();  // before sizes and memory part
        const measuring scope(model, cells, query_rows);
        if (cells) {
            std::vector<int64_t> slot_bytes(n_devices);
            if (const auto status = kvf_probe(&model, params.type_k, params.type_v, params.offload_kqv, slot_bytes.data(), n_devices)) {
                return status;
            }
        }
        std::unique_ptr<llama_context, free_context> ctx { llama_init_from_model(&model, params) };
        if (!ctx) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "%s", log.errors("there can be no such context"));
        }
        if (cells && params.n_seq_max > 1) {
            if (const auto refusal = kvf_sequences_refusal(*ctx); !refusal.empty()) {
                return kvf_fail(KVF_STATUS_REFUSED, "%s", refusal.c_str());
            }
        }
        std::fill(layers, layers + n_layers, kvf_layer_need { n_devices - 1, 0, 0, 0, 0, 0 });
        describe_layers(model, ctx->get_memory(), layers);
        name_needs(model, needs);
        for (const auto & [buft, size] : weights) {
            needs[device_of(model, buft)].model += size;
        }
        sum_measured(*ctx, model, needs);
        sum_queries(*ctx, model, needs);
        return KVF_STATUS_SUCCESS;
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%s", err.what());
    }
}

kvf_status kvf_context_needs(const void * ctx_ptr, kvf_need * needs, int32_t n_devices) {
    const auto & ctx   = *(const llama_context *) ctx_ptr;
    const auto & model = ctx.get_model();
    if (n_devices != kvf_model_n_devices(&model)) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices, there are %d", n_devices, kvf_model_n_devices(&model));
    }
    name_needs(model, needs);
    for (const auto & [buft, size] : ctx.memory_breakdown()) {
        auto & need = needs[device_of(model, buft)];
        need.model   += size.model;
        need.context += size.context;
        need.compute += size.compute;
    }
    sum_queries(ctx, model, needs);
    return KVF_STATUS_SUCCESS;
}
