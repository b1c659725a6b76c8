// Which devices hold the pool, and how each of them moves bytes.
#include "kvf_device.h"
#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_probe.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace {

// Do events order what is submitted to a device?
bool has_queues(ggml_backend_dev_t dev) {
    ggml_backend_dev_props props {};
    ggml_backend_dev_get_props(dev, &props);
    return props.caps.async && props.caps.events;
}

// Threads wait for transfers while another one submits: only of these backends it is known that they can be used so.
kvf_mode mode_by_backend(ggml_backend_dev_t dev) {
    const std::string backend = kvf_backend_name(dev);
    if (backend == "RPC") {
        return KVF_MODE_REMOTE;
    }
    return backend == "CUDA" || backend == "ROCm" || backend == "MUSA" ? KVF_MODE_STREAM : KVF_MODE_SYNC;
}

// KVFLASH_LANE, for tests: stream, or sync.
kvf_mode mode_asked_for(ggml_backend_dev_t dev, const std::string & asked) {
    if (asked == "sync") {
        return KVF_MODE_SYNC;
    }
    if (asked != "stream") {
        throw std::runtime_error("KVFLASH_LANE is '" + asked + "': stream, or sync");
    }
    if (!has_queues(dev)) {
        throw std::runtime_error(std::string("KVFLASH_LANE is 'stream', and ") + ggml_backend_dev_name(dev) + " has no events");
    }
    return std::string(kvf_backend_name(dev)) == "RPC" ? KVF_MODE_REMOTE : KVF_MODE_STREAM;
}

kvf_mode mode_of(const kvf_engine & engine, const kvf_lane & lane) {
    if (kvf_is_cpu(lane.dev)) {
        return engine.shares_host ? KVF_MODE_SYNC : KVF_MODE_HOST;
    }
    if (!lane.compute) {
        return KVF_MODE_SYNC;
    }
    if (const char * asked = getenv("KVFLASH_LANE")) {
        return mode_asked_for(lane.dev, asked);
    }
    return has_queues(lane.dev) ? mode_by_backend(lane.dev) : KVF_MODE_SYNC;
}

// A device that reads host memory where it is computes with it beside the host: nothing there is settled when a step returns.
bool shares_host(const kvf_engine & engine) {
    auto * sched = engine.ctx.get_sched();
    const int n  = ggml_backend_sched_get_n_backends(sched);
    auto * host  = ggml_backend_sched_get_backend(sched, n - 1);  // the CPU
    for (int i = 0; i + 1 < n; ++i) {
        auto * backend = ggml_backend_sched_get_backend(sched, i);
        ggml_backend_dev_props props {};
        ggml_backend_dev_get_props(ggml_backend_get_device(backend), &props);
        if (props.caps.async && (ggml_backend_supports_buft(backend, ggml_backend_sched_get_buffer_type(sched, host)) ||
                                 ggml_backend_supports_buft(backend, ggml_backend_cpu_buffer_type()))) {
            return true;
        }
    }
    return false;
}

kvf_lane make_lane(const kvf_engine & engine, const kvf_share & share) {
    kvf_lane lane;
    lane.dev          = share.dev;
    lane.first_layer  = share.first_layer;
    lane.n_layers     = share.n_layers;
    lane.share_offset = share.offset;
    lane.share_bytes  = share.size;

    const auto & cached = kvf_access::layers(engine.kv);
    for (int32_t i = share.first_layer; i < share.first_layer + share.n_layers; ++i) {
        const auto & l = engine.layers[i];
        lane.spans.push_back({ cached[i].k, (size_t) l.k_offset, (size_t) l.k_row*KVF_BLOCK });
        if (l.has_v) {
            lane.spans.push_back({ cached[i].v, (size_t) l.v_offset, (size_t) l.v_row*KVF_BLOCK });
        }
    }
    lane.compute = kvf_compute_of(engine, lane.spans[0].tensor);
    lane.mode    = mode_of(engine, lane);
    if (lane.mode == KVF_MODE_STREAM || lane.mode == KVF_MODE_REMOTE) {
        lane.copy.reset(ggml_backend_dev_init(lane.dev, nullptr));
        if (!lane.copy) {
            throw std::runtime_error(std::string("no queue for transfers could be made on ") + ggml_backend_dev_name(lane.dev));
        }
        kvf_staging_init(lane, engine.info.n_slots/KVF_BLOCK);
    }
    if (lane.mode == KVF_MODE_STREAM) {
        lane.compute_mark.reset(ggml_backend_event_new(lane.dev));
    }
    return lane;
}

// Page images are in the memory that suits the device with most of them; all devices of one backend can use it.
ggml_backend_buffer_type_t host_memory(const kvf_engine & engine) {
    auto *  res  = ggml_backend_cpu_buffer_type();
    int64_t most = 0;
    for (const auto & lane : engine.lanes) {
        auto * buft = kvf_is_cpu(lane.dev) ? nullptr : ggml_backend_dev_host_buffer_type(lane.dev);
        if (buft && lane.share_bytes > most) {
            most = lane.share_bytes;
            res  = buft;
        }
    }
    return res;
}

int64_t query_bytes(const kvf_engine & engine, const kvf_lane & lane) {
    int64_t res = 0;
    for (const auto & ring : engine.pool.rings) {
        if (ring.first_layer == lane.first_layer) {
            res += ggml_backend_buffer_get_size(ring.buffer.get());
        }
    }
    return res;
}

}  // namespace

ggml_backend_t kvf_compute_of(const kvf_engine & engine, const ggml_tensor * tensor) {
    auto *         dev   = kvf_device_of(tensor);
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
    engine.shares_host = shares_host(engine);
    for (const auto & share : kvf_describe_shares(engine.kv, engine.layers)) {
        for (int32_t i = share.first_layer; i < share.first_layer + share.n_layers; ++i) {
            engine.layers[i].device = engine.lanes.size();
        }
        engine.lanes.push_back(make_lane(engine, share));
        const auto & lane = engine.lanes.back();
        engine.info.device_bytes += lane.stage ? ggml_backend_buffer_get_size(lane.stage->buffer.get()) : 0;
    }
    for (auto & lane : engine.lanes) {
        engine.by_mode.push_back(&lane);
    }
    std::stable_sort(engine.by_mode.begin(), engine.by_mode.end(), [](auto * a, auto * b) { return a->mode < b->mode; });
    engine.host_buft      = host_memory(engine);
    engine.info.n_devices = engine.lanes.size();
}

void kvf_lane_follow(kvf_engine & engine, const kvf_lane & lane) {
    switch (lane.mode) {
        case KVF_MODE_STREAM:
            ggml_backend_event_record(lane.compute_mark.get(), lane.compute);
            ggml_backend_event_wait(lane.copy.get(), lane.compute_mark.get());
            break;
        case KVF_MODE_REMOTE:  // one queue for both
        case KVF_MODE_HOST:    // the scheduler waits for what the CPU computes, and for what it reads of other devices
            break;
        case KVF_MODE_SYNC:
            if (lane.compute && !kvf_is_cpu(lane.dev)) {
                ggml_backend_synchronize(lane.compute);
            } else {
                llama_synchronize(&engine.ctx);
            }
            break;
    }
}

const kvf_lane * kvf_lane_beside(const kvf_engine & engine, const ggml_tensor * tensor) {
    auto * dev = kvf_device_of(tensor);
    const auto found = std::find_if(engine.lanes.begin(), engine.lanes.end(), [dev](const auto & lane) {
        return lane.mode == KVF_MODE_STREAM && lane.dev == dev;
    });
    return found == engine.lanes.end() ? nullptr : &*found;
}

void kvf_lane_get(const kvf_lane & lane, const ggml_tensor * tensor, void * data, size_t offset, size_t size, size_t n,
                  size_t apart) {
    if (lane.copy) {
        ggml_backend_tensor_get_2d_async(lane.copy.get(), tensor, data, offset, size, n, apart, apart);
    } else {
        ggml_backend_tensor_get_2d(tensor, data, offset, size, n, apart, apart);
    }
}

void kvf_lane_set(const kvf_lane & lane, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    if (lane.copy) {
        ggml_backend_tensor_set_async(lane.copy.get(), tensor, data, offset, size);
    } else {
        ggml_backend_tensor_set(tensor, data, offset, size);
    }
}

kvf_status kvf_get_devices(const kvf_engine * engine, kvf_device * devices, int32_t n) {
    if (n != engine->info.n_devices) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "room for %d devices, there are %d", n, engine->info.n_devices);
    }
    for (const auto & lane : engine->lanes) {
        auto & d = *devices++;
        d = kvf_describe_device(lane.dev);
        d.mode          = lane.mode;
        d.first_layer   = lane.first_layer;
        d.n_layers      = lane.n_layers;
        d.share_offset  = lane.share_offset;
        d.share_bytes   = lane.share_bytes;
        d.staging_bytes = lane.stage ? ggml_backend_buffer_get_size(lane.stage->buffer.get()) : 0;
        d.query_bytes   = query_bytes(*engine, lane);
        d.largest_bytes = lane.mode == KVF_MODE_REMOTE ? 0 : kvf_largest_tensor(d.name);
    }
    return KVF_STATUS_SUCCESS;
}
