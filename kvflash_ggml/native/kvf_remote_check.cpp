// Is a remote device near enough, and does it compute what a pool needs?
#include "kvf_error.h"
#include "kvf_remote.h"

#include "ggml-cpp.h"

#include <algorithm>
#include <chrono>
#include <vector>

namespace {

constexpr int64_t HEAD = 128, ROWS = 256;

// Tensors on a device, a backend that computes there.
struct bench {
    ggml_context_ptr        ctx { ggml_init({ 32*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true }) };
    ggml_backend_ptr        backend;
    ggml_backend_buffer_ptr buffer;

    explicit bench(ggml_backend_dev_t dev) : backend(ggml_backend_dev_init(dev, nullptr)) {}

    bool alloc() {
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx.get(), backend.get()));
        if (buffer) {
            ggml_backend_buffer_clear(buffer.get(), 0);
        }
        return buffer != nullptr;
    }
};

kvf_status status_of(ggml_backend_dev_t dev) {
    return kvf_check_servers({ ggml_backend_dev_description(dev) });
}

kvf_status no_device(const char * name) {
    return kvf_fail(KVF_STATUS_ARGUMENT, "no server that is connected has a device %s", name);
}

template <typename F> double seconds(F && work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

kvf_status kvf_rpc_measure(const char * device, int64_t size, double * round_trip, double * sent, double * received) {
    auto * dev = kvf_find_remote(device);
    if (!dev) {
        return no_device(device);
    }
    bench  b(dev);
    auto * t = ggml_new_tensor_1d(b.ctx.get(), GGML_TYPE_I8, size);
    if (!b.alloc()) {
        return kvf_fail(KVF_STATUS_MEMORY, "no room for %lld bytes on %s", (long long) size, ggml_backend_dev_name(dev));
    }
    std::vector<uint8_t> data(size, 1);
    std::vector<double>  times(100);
    for (auto & time : times) {
        time = seconds([&] { ggml_backend_tensor_get(t, data.data(), 0, 1); });
    }
    std::nth_element(times.begin(), times.begin() + times.size()/2, times.end());
    *round_trip = times[times.size()/2];
    *sent       = seconds([&] { ggml_backend_tensor_set(t, data.data(), 0, size); ggml_backend_tensor_get(t, data.data(), 0, 1); });
    *received   = seconds([&] { ggml_backend_tensor_get(t, data.data(), 0, size); });
    return status_of(dev);
}

kvf_status kvf_rpc_try(const char * device, int32_t type) {
    auto * dev = kvf_find_remote(device);
    if (!dev) {
        return no_device(device);
    }
    bench  b(dev);
    auto * ctx  = b.ctx.get();
    auto * k    = ggml_new_tensor_3d(ctx, (ggml_type) type, HEAD, ROWS, 1);
    auto * v    = ggml_new_tensor_3d(ctx, (ggml_type) type, HEAD, ROWS, 1);
    auto * q    = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, HEAD, 1, 1);
    auto * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, ROWS, 1);
    auto * row  = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, HEAD, 1, 1);
    auto * at   = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 1);
    auto * out  = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f, 0.0f, 0.0f);
    auto * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, ggml_set_rows(ctx, k, row, at));
    ggml_build_forward_expand(graph, out);
    if (!b.alloc()) {
        return kvf_fail(KVF_STATUS_MEMORY, "no room on %s", ggml_backend_dev_name(dev));
    }
    ggml_backend_graph_compute(b.backend.get(), graph);
    float value = 0.0f;
    ggml_backend_tensor_get(out, &value, 0, sizeof(value));
    return status_of(dev);
}
