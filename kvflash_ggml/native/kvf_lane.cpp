// Which devices hold the pool.
#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_remote.h"

#include <algorithm>

namespace {

ggml_backend_dev_t device_of(const ggml_tensor * tensor) {
    return ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
}

kvf_lane make_lane(ggml_backend_dev_t dev, ggml_backend_t compute) {
    kvf_lane lane;
    lane.dev     = dev;
    lane.compute = compute;
    lane.remote  = kvf_is_remote(dev);
    ggml_backend_dev_props props {};
    if (compute && dev) {
        ggml_backend_dev_get_props(dev, &props);
    }
    if (props.caps.async && props.caps.events && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        lane.copy.reset(ggml_backend_dev_init(dev, nullptr));
        lane.compute_mark.reset(ggml_backend_event_new(dev));
        for (auto & event : lane.done) {
            event.reset(ggml_backend_event_new(dev));
        }
    }
    return lane;
}

int32_t lane_of(kvf_engine & engine, const ggml_tensor * tensor) {
    auto *     compute = kvf_compute_of(engine, tensor);
    const auto same    = std::find_if(engine.lanes.begin(), engine.lanes.end(),
                                      [compute](const auto & lane) { return lane.compute == compute; });
    if (same != engine.lanes.end()) {
        return same - engine.lanes.begin();
    }
    engine.lanes.push_back(make_lane(device_of(tensor), compute));
    return engine.lanes.size() - 1;
}

}  // namespace

ggml_backend_t kvf_compute_of(const kvf_engine & engine, const ggml_tensor * tensor) {
    auto *         dev   = device_of(tensor);
    auto *         sched = engine.ctx.get_sched();
    ggml_backend_t res   = nullptr;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        auto * backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == dev) {
            res = backend;
        }
    }
    return res;
}

void kvf_lanes_init(kvf_engine & engine) {
    const auto & cached = kvf_access::layers(engine.kv);
    for (size_t i = 0; i < cached.size(); ++i) {
        auto & l = engine.layers[i];
        l.device = lane_of(engine, cached[i].k);
        auto & lane = engine.lanes[l.device];
        lane.n_layers++;
        lane.spans.push_back({ cached[i].k, (size_t) l.k_offset, (size_t) l.k_row*KVF_BLOCK });
        if (l.has_v) {
            lane.spans.push_back({ cached[i].v, (size_t) l.v_offset, (size_t) l.v_row*KVF_BLOCK });
        }
    }
    for (auto & lane : engine.lanes) {
        if (lane.copy && !lane.remote) {  // a graph of its own would push that of the steps out of the server
            lane.stage = kvf_staging_init(lane, engine.info.n_slots/KVF_BLOCK);
            engine.info.device_bytes += lane.stage ? ggml_backend_buffer_get_size(lane.stage->buffer.get()) : 0;
        }
    }
    engine.info.n_devices = engine.lanes.size();
}

kvf_status kvf_get_devices(const kvf_engine * engine, kvf_device * devices, int32_t n) {
    if (n != engine->info.n_devices) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices, there are %d", n, engine->info.n_devices);
    }
    for (const auto & lane : engine->lanes) {
        // plain host memory belongs to no device
        auto * dev = lane.dev ? lane.dev : ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
        size_t free = 0, total = 0;
        ggml_backend_dev_memory(dev, &free, &total);
        auto & d = *devices++;
        d = {};
        snprintf(d.name, sizeof(d.name), "%s", ggml_backend_dev_name(dev));
        d.n_layers     = lane.n_layers;
        d.pinned       = lane.dev && ggml_backend_dev_host_buffer_type(lane.dev) != nullptr;
        d.asynchronous = lane.copy != nullptr;
        d.free_bytes   = free;
        d.total_bytes  = total;
    }
    return KVF_STATUS_SUCCESS;
}
