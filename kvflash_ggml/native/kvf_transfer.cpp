// Moves whole blocks between the pool and host memory.
#include "kvf_engine.h"

#include <algorithm>
#include <chrono>

namespace {

kvf_device & device_of(kvf_engine & engine, const ggml_tensor * tensor) {
    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
    auto * sched = engine.ctx.get_sched();
    ggml_backend_t compute = nullptr;
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        auto * backend = ggml_backend_sched_get_backend(sched, i);
        if (ggml_backend_get_device(backend) == dev) {
            compute = backend;
        }
    }
    for (auto & device : engine.devices) {
        if (device.compute == compute) {
            return device;
        }
    }

    engine.devices.emplace_back();
    auto & device  = engine.devices.back();
    device.compute = compute;
    ggml_backend_dev_props props {};
    if (compute && dev) {
        ggml_backend_dev_get_props(dev, &props);
    }
    if (props.caps.async && props.caps.events && ggml_backend_dev_type(dev) != GGML_BACKEND_DEVICE_TYPE_CPU) {
        device.copy.reset(ggml_backend_dev_init(dev, nullptr));
        device.compute_mark.reset(ggml_backend_event_new(dev));
        for (auto & event : device.done) {
            event.reset(ggml_backend_event_new(dev));
        }
    }
    return device;
}

constexpr int64_t HOST_GAP = 64;  // bytes after each host allocation

// Blocks [block, block + n) side by side in the pool, and their images side by side on the host: one strided copy per
// span. Such images are of one allocation, see HOST_GAP.
struct run {
    int32_t   block;
    int32_t   n;
    uint8_t * image;
};

std::vector<run> find_runs(int32_t n, const int32_t * block, const uint64_t * image, size_t page_bytes) {
    std::vector<run> runs;
    for (int32_t i = 0; i < n; ++i) {
        auto * data = (uint8_t *) (uintptr_t) image[i];
        if (!runs.empty()) {
            auto & last = runs.back();
            if (block[i] == last.block + last.n && data == last.image + last.n*page_bytes) {
                last.n++;
                continue;
            }
        }
        runs.push_back({ block[i], 1, data });
    }
    return runs;
}

enum class direction { out, in };

void copy_span(const kvf_device & device, const kvf_device::span & s, const run & r, size_t page_bytes, direction dir) {
    const size_t at  = r.block*s.size;
    auto *       ptr = r.image + s.offset;
    auto *       backend = device.copy.get();
    if (!backend) {
        if (dir == direction::out) {
            ggml_backend_tensor_get_2d(s.tensor, ptr, at, s.size, r.n, s.size, page_bytes);
        } else {
            ggml_backend_tensor_set_2d(s.tensor, ptr, at, s.size, r.n, s.size, page_bytes);
        }
    } else if (dir == direction::out) {
        ggml_backend_tensor_get_2d_async(backend, s.tensor, ptr, at, s.size, r.n, s.size, page_bytes);
    } else {
        ggml_backend_tensor_set_2d_async(backend, s.tensor, ptr, at, s.size, r.n, s.size, page_bytes);
    }
}

// The copy streams continue after the compute submitted so far.
void begin_transfer(kvf_engine & engine) {
    for (auto & device : engine.devices) {
        if (device.copy) {
            ggml_backend_event_record(device.compute_mark.get(), device.compute);
            ggml_backend_event_wait(device.copy.get(), device.compute_mark.get());
        } else {
            llama_synchronize(&engine.ctx);
        }
    }
}

void end_transfer(kvf_engine & engine, uint64_t ticket) {
    for (auto & device : engine.devices) {
        if (device.copy) {
            ggml_backend_event_record(device.done[ticket % kvf_device::N_EVENTS].get(), device.copy.get());
        }
    }
}

uint64_t transfer(kvf_engine & engine, int32_t n, const int32_t * block, const uint64_t * image, direction dir) {
    const auto runs   = find_runs(n, block, image, engine.info.page_bytes);
    const auto ticket = ++engine.last_ticket;
    begin_transfer(engine);
    for (auto & device : engine.devices) {
        if (dir == direction::in && device.stage && n > 1) {  // one page is not worth the scatter
            kvf_staging_page_in(device, n, block, image);
            continue;
        }
        for (const auto & r : runs) {
            for (const auto & s : device.spans) {
                copy_span(device, s, r, engine.info.page_bytes, dir);
            }
        }
    }
    end_transfer(engine, ticket);
    return ticket;
}

bool blocks_ok(const kvf_engine & engine, int32_t n, const int32_t * block, const uint64_t * image) {
    if (n <= 0 || engine.info.v_trans) {
        return false;
    }
    for (int32_t i = 0; i < n; ++i) {
        if (block[i] < 0 || (block[i] + 1)*KVF_BLOCK > engine.info.n_slots || image[i] == 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

void kvf_devices_open(kvf_engine & engine) {
    const auto & cached = kvf_access::layers(engine.kv);
    engine.info.async = 1;
    for (size_t i = 0; i < cached.size(); ++i) {
        const auto & l = engine.layers[i];
        auto & device = device_of(engine, cached[i].k);
        device.spans.push_back({ cached[i].k, (size_t) l.k_offset, (size_t) l.k_row*KVF_BLOCK });
        if (l.has_v) {
            device.spans.push_back({ cached[i].v, (size_t) l.v_offset, (size_t) l.v_row*KVF_BLOCK });
        }
        engine.info.async = engine.info.async && device.copy;
    }
    for (auto & device : engine.devices) {
        if (device.copy) {
            device.stage = kvf_staging_open(device, engine.info.n_slots/KVF_BLOCK);
            engine.info.device_bytes += device.stage ? ggml_backend_buffer_get_size(device.stage->buffer.get()) : 0;
        }
    }
    auto * dev = ggml_backend_buft_get_device(ggml_backend_buffer_get_type(cached[0].k->buffer));
    engine.info.pinned = dev && ggml_backend_dev_host_buffer_type(dev) != nullptr;
    snprintf(engine.info.device, sizeof(engine.info.device), "%s", dev ? ggml_backend_dev_name(dev) : "CPU");
}

void kvf_compute_waits(kvf_engine & engine, uint64_t ticket) {
    for (auto & device : engine.devices) {
        if (device.copy && ticket > 0) {
            // an overwritten event marks a later transfer of the same stream, so waiting for it is only stricter
            ggml_backend_event_wait(device.compute, device.done[ticket % kvf_device::N_EVENTS].get());
        }
    }
}

uint64_t kvf_page_out(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image) {
    return blocks_ok(*engine, n, block, image) ? transfer(*engine, n, block, image, direction::out) : 0;
}

uint64_t kvf_page_in(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image) {
    if (!blocks_ok(*engine, n, block, image)) {
        return 0;
    }
    engine->compute_barrier = transfer(*engine, n, block, image, direction::in);
    return engine->compute_barrier;
}

uint64_t kvf_query_read(kvf_engine * engine, float * out) {
    const auto ticket = ++engine->last_ticket;
    begin_transfer(*engine);
    for (const auto & layer : engine->layers) {
        const auto query = engine->pool.queries.find(layer.il);
        if (query == engine->pool.queries.end()) {
            return 0;
        }
        auto * rows = query->second.rows;
        if (auto * copy = device_of(*engine, rows).copy.get()) {
            ggml_backend_tensor_get_async(copy, rows, out, 0, ggml_nbytes(rows));
        } else {
            ggml_backend_tensor_get(rows, out, 0, ggml_nbytes(rows));
        }
        out += ggml_nelements(rows);
    }
    end_transfer(*engine, ticket);
    engine->compute_barrier = ticket;
    return ticket;
}

void kvf_wait(kvf_engine * engine, uint64_t ticket) {
    for (auto & device : engine->devices) {
        if (device.copy && ticket > 0) {
            ggml_backend_event_synchronize(device.done[ticket % kvf_device::N_EVENTS].get());
        }
    }
}

double kvf_plain_copy(kvf_engine * engine, int64_t size, int to_device) {
    auto & device = engine->devices.front();
    auto * buft   = ggml_backend_buffer_get_type(device.spans.front().tensor->buffer);
    ggml_context_ptr ctx { ggml_init({ ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    auto * tensor = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, size);
    ggml_backend_buffer_ptr buffer { ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), buft) };
    auto * host = kvf_host_alloc(engine, size);
    if (!buffer || !host) {
        return -1.0;
    }
    kvf_synchronize(engine);
    const auto start = std::chrono::steady_clock::now();
    if (auto * backend = device.copy.get()) {
        to_device ? ggml_backend_tensor_set_async(backend, tensor, host, 0, size)
                  : ggml_backend_tensor_get_async(backend, tensor, host, 0, size);
        ggml_backend_synchronize(backend);
    } else {
        to_device ? ggml_backend_tensor_set(tensor, host, 0, size) : ggml_backend_tensor_get(tensor, host, 0, size);
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    kvf_host_free(engine, host);
    return took.count();
}

void * kvf_host_alloc(kvf_engine * engine, int64_t size) {
    auto * dev  = ggml_backend_buft_get_device(
            ggml_backend_buffer_get_type(kvf_access::layers(engine->kv)[0].k->buffer));
    auto * buft = dev ? ggml_backend_dev_host_buffer_type(dev) : nullptr;
    if (!buft) {
        buft = ggml_backend_cpu_buffer_type();
    }
    // the gap keeps images of two allocations from lying side by side: a copy across them is refused by CUDA
    ggml_backend_buffer_ptr buffer { ggml_backend_buft_alloc_buffer(buft, size + HOST_GAP) };
    if (!buffer) {
        return nullptr;
    }
    auto * data = ggml_backend_buffer_get_base(buffer.get());
    std::lock_guard<std::mutex> lock(engine->host_mutex);
    engine->host.push_back(std::move(buffer));
    return data;
}

void kvf_host_free(kvf_engine * engine, void * data) {
    std::lock_guard<std::mutex> lock(engine->host_mutex);
    auto & host = engine->host;
    host.erase(std::remove_if(host.begin(), host.end(), [data](const auto & buffer) {
        return ggml_backend_buffer_get_base(buffer.get()) == data;
    }), host.end());
}
