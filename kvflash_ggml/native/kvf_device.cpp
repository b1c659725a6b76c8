#include "kvf_device.h"

#include "kvf_error.h"
#include "kvf_remote.h"

#include "ggml-cpp.h"
#include "llama-impl.h"
#include "llama.h"

#include <cstdlib>
#include <cstring>
#include <regex>
#include <string>

namespace {

int32_t kind_of(ggml_backend_dev_t dev) {
    switch (ggml_backend_dev_type(dev)) {
        case GGML_BACKEND_DEVICE_TYPE_CPU:  return KVF_DEVICE_CPU;
        case GGML_BACKEND_DEVICE_TYPE_GPU:  return KVF_DEVICE_GPU;
        case GGML_BACKEND_DEVICE_TYPE_IGPU: return KVF_DEVICE_INTEGRATED;
        default:                            return KVF_DEVICE_OTHER;
    }
}

kvf_status find_device(const char * name, ggml_backend_dev_t * dev) {
    *dev = ggml_backend_dev_by_name(name);
    if (!*dev) {
        *dev = kvf_find_remote(name);
    }
    return *dev ? KVF_STATUS_SUCCESS : kvf_fail(KVF_STATUS_ARGUMENT, "there is no device %s", name);
}

// A backend tells of its bounds only that it does not take an operation.
bool computes_on(ggml_backend_dev_t dev, int64_t size) {
    const ggml_context_ptr ctx { ggml_init({ 2*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    auto * tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_F32, size/sizeof(float));
    return ggml_backend_dev_supports_op(dev, ggml_scale(ctx.get(), tensor, 1.0f));
}

kvf_status check_pattern(const char * pattern) {
    try {
        std::regex { pattern };
        return KVF_STATUS_SUCCESS;
    } catch (const std::regex_error & err) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "'%s' is no regular expression: %s", pattern, err.what());
    }
}

}  // namespace

bool kvf_is_cpu(ggml_backend_dev_t dev) {
    return ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

const char * kvf_backend_name(ggml_backend_dev_t dev) {
    auto * reg = ggml_backend_dev_backend_reg(dev);
    return reg ? ggml_backend_reg_name(reg) : "";
}

bool kvf_is_cuda(ggml_backend_dev_t dev) {
    const std::string backend = dev ? kvf_backend_name(dev) : "";
    return backend == "CUDA" || backend == "ROCm" || backend == "MUSA";
}

ggml_backend_dev_t kvf_device_of(const ggml_tensor * tensor) {
    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    return dev ? dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

void kvf_zero(ggml_tensor * tensor, size_t offset, size_t size) {
    auto * dev = kvf_device_of(tensor);
    if (!strcmp(kvf_backend_name(dev), "CPU") || kvf_is_cuda(dev)) {
        ggml_backend_tensor_memset(tensor, 0, offset, size);
    } else {
        llama_clear_tensor_data(tensor, offset, size);  // not all backends can set memory, nor servers of them
    }
}

kvf_device kvf_describe_device(ggml_backend_dev_t dev) {
    kvf_device d {};
    ggml_backend_dev_props props {};
    ggml_backend_dev_get_props(dev, &props);
    snprintf(d.name, sizeof(d.name), "%s", ggml_backend_dev_name(dev));
    snprintf(d.description, sizeof(d.description), "%s", ggml_backend_dev_description(dev));
    snprintf(d.backend, sizeof(d.backend), "%s", kvf_backend_name(dev));
    snprintf(d.id, sizeof(d.id), "%s", props.device_id ? props.device_id : "");
    d.kind         = kind_of(dev);
    d.pinned       = !kvf_is_cpu(dev) && ggml_backend_dev_host_buffer_type(dev) != nullptr;
    d.asynchronous = !kvf_is_cpu(dev) && props.caps.async;
    d.free_bytes   = props.memory_free;
    d.total_bytes  = props.memory_total;
    return d;
}

int32_t kvf_device_count(void) {
    return ggml_backend_dev_count();
}

kvf_status kvf_list_devices(kvf_device * devices, int32_t n) {
    if (n != kvf_device_count()) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices, there are %d", n, kvf_device_count());
    }
    for (int32_t i = 0; i < n; ++i) {
        devices[i] = kvf_describe_device(ggml_backend_dev_get(i));
    }
    return KVF_STATUS_SUCCESS;
}

int64_t kvf_largest_tensor(const char * device) {
    auto *  dev   = ggml_backend_dev_by_name(device);
    int64_t takes = 1 << 20, refuses = INT64_C(1) << 46;
    if (!dev || kvf_is_cpu(dev) || !computes_on(dev, takes) || computes_on(dev, refuses)) {
        return 0;
    }
    while (refuses - takes > (int64_t) sizeof(float)) {
        const int64_t size = takes + (refuses - takes)/8*4;
        (computes_on(dev, size) ? takes : refuses) = size;
    }
    return takes;
}

kvf_status kvf_device_list(int32_t n, const char * const * name, void ** list) {
    auto * res = (ggml_backend_dev_t *) calloc(n + 1, sizeof(ggml_backend_dev_t));
    if (!res) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory for %d devices", n);
    }
    for (int32_t i = 0; i < n; ++i) {
        if (const auto status = find_device(name[i], &res[i])) {
            free(res);
            return status;
        }
    }
    *list = res;
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_overrides(int32_t n, const char * const * pattern, const char * const * device, void ** list) {
    size_t size = (n + 1)*sizeof(llama_model_tensor_buft_override);
    for (int32_t i = 0; i < n; ++i) {
        if (const auto status = check_pattern(pattern[i])) {
            return status;
        }
        size += strlen(pattern[i]) + 1;
    }
    auto * res = (llama_model_tensor_buft_override *) calloc(1, size);
    if (!res) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory for %d overrides", n);
    }
    auto * text = (char *) (res + n + 1);  // the patterns follow the list
    for (int32_t i = 0; i < n; ++i) {
        ggml_backend_dev_t dev = nullptr;
        if (const auto status = find_device(device[i], &dev)) {
            free(res);
            return status;
        }
        res[i].pattern = strcpy(text, pattern[i]);
        res[i].buft    = kvf_is_cpu(dev) ? ggml_backend_cpu_buffer_type() : ggml_backend_dev_buffer_type(dev);
        text += strlen(pattern[i]) + 1;
    }
    *list = res;
    return KVF_STATUS_SUCCESS;
}

int kvf_finds(const char * pattern, const char * name) {
    return check_pattern(pattern) == KVF_STATUS_SUCCESS && std::regex_search(name, std::regex(pattern));
}

void kvf_list_free(void * list) {
    free(list);
}
