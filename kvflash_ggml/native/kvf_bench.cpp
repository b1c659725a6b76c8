#include "kvf_engine.h"
#include "kvf_error.h"

#include <chrono>

kvf_status kvf_bench_copy(kvf_engine * engine, int32_t device, int64_t size, int32_t to_device, double * seconds) {
    if (device < 0 || device >= engine->info.n_devices) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "device %d of %d", device, engine->info.n_devices);
    }
    const auto & lane = engine->lanes[device];
    auto * buft = ggml_backend_buffer_get_type(lane.spans.front().tensor->buffer);
    ggml_context_ptr ctx { ggml_init({ ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    auto * tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, size);
    ggml_backend_buffer_ptr buffer { ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft) };
    if (!buffer) {
        return kvf_fail(KVF_STATUS_MEMORY, "no device memory for a copy of %lld bytes", (long long) size);
    }
    void * host = nullptr;
    if (const auto status = kvf_host_alloc(engine, size, &host)) {
        return status;
    }
    kvf_synchronize(engine);
    const auto start = std::chrono::steady_clock::now();
    to_device ? kvf_lane_set(lane, tensor, host, 0, size) : kvf_lane_get(lane, tensor, host, 0, size);
    if (lane.copy) {
        ggml_backend_synchronize(lane.copy.get());
    }
    *seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    kvf_host_free(engine, host);
    return KVF_STATUS_SUCCESS;
}
