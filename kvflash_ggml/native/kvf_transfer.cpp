// Moves whole blocks between the pool and host memory.
#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_remote.h"

#include <algorithm>

namespace {

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

void copy_span(const kvf_lane & lane, const kvf_lane::span & s, const run & r, size_t page_bytes, direction dir) {
    const size_t at  = r.block*s.size;
    auto *       ptr = r.image + s.offset;
    auto *       backend = lane.copy.get();
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

uint64_t transfer(kvf_engine & engine, int32_t n, const int32_t * block, const uint64_t * image, direction dir) {
    const auto runs   = find_runs(n, block, image, engine.info.page_bytes);
    const auto ticket = kvf_transfer_begin(engine);
    for (auto & lane : engine.lanes) {
        if (dir == direction::in && lane.stage && n > 1) {  // one page is not worth the scatter
            kvf_staging_page_in(lane, n, block, image);
            continue;
        }
        for (const auto & r : runs) {
            for (const auto & s : lane.spans) {
                copy_span(lane, s, r, engine.info.page_bytes, dir);
            }
        }
    }
    kvf_transfer_end(engine, ticket);
    return ticket;
}

kvf_status check_pages(const kvf_engine & engine, int32_t n, const int32_t * block, const uint64_t * image) {
    if (engine.info.v_trans) {
        return kvf_fail(KVF_STATUS_UNSUPPORTED, "V is stored transposed, so pages cannot move: use flash attention");
    }
    if (n <= 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "%d blocks to move", n);
    }
    const int32_t n_blocks = engine.info.n_slots/KVF_BLOCK;
    for (int32_t i = 0; i < n; ++i) {
        if (block[i] < 0 || block[i] >= n_blocks) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "block %d of %d", block[i], n_blocks);
        }
        if (image[i] == 0) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "block %d has no page image", block[i]);
        }
    }
    return KVF_STATUS_SUCCESS;
}

}  // namespace

void kvf_copies_wait(kvf_engine & engine) {
    for (auto & lane : engine.lanes) {
        if (lane.copy) {
            ggml_backend_event_record(lane.compute_mark.get(), lane.compute);
            ggml_backend_event_wait(lane.copy.get(), lane.compute_mark.get());
        } else {
            llama_synchronize(&engine.ctx);
        }
    }
}

uint64_t kvf_transfer_begin(kvf_engine & engine) {
    kvf_copies_wait(engine);
    return ++engine.last_ticket;
}

void kvf_transfer_end(kvf_engine & engine, uint64_t ticket) {
    for (auto & lane : engine.lanes) {
        if (lane.copy) {
            auto * event = lane.done[ticket % kvf_lane::N_EVENTS].get();
            if (lane.remote && ticket > kvf_lane::N_EVENTS && kvf_event_sound(event)) {
                lane.sound = ticket - kvf_lane::N_EVENTS;
            }
            ggml_backend_event_record(event, lane.copy.get());
        }
    }
}

void kvf_compute_waits(kvf_engine & engine, uint64_t ticket) {
    for (auto & lane : engine.lanes) {
        if (lane.copy && ticket > 0) {
            // an overwritten event marks a later transfer of the same stream, so waiting for it is only stricter
            ggml_backend_event_wait(lane.compute, lane.done[ticket % kvf_lane::N_EVENTS].get());
        }
    }
}

kvf_status kvf_page_out(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image, uint64_t * ticket) {
    if (const auto status = check_pages(*engine, n, block, image)) {
        return status;
    }
    *ticket = transfer(*engine, n, block, image, direction::out);
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_page_in(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image, uint64_t * ticket) {
    if (const auto status = check_pages(*engine, n, block, image)) {
        return status;
    }
    *ticket = engine->compute_barrier = transfer(*engine, n, block, image, direction::in);
    return KVF_STATUS_SUCCESS;
}

void kvf_wait(kvf_engine * engine, uint64_t ticket) {
    for (auto & lane : engine->lanes) {
        if (lane.copy && ticket > 0) {
            ggml_backend_event_synchronize(lane.done[ticket % kvf_lane::N_EVENTS].get());
        }
    }
}

int kvf_sound(kvf_engine * engine, uint64_t ticket) {
    return std::all_of(engine->lanes.begin(), engine->lanes.end(), [ticket](const auto & lane) {
        return !lane.remote || ticket <= lane.sound || kvf_event_sound(lane.done[ticket % kvf_lane::N_EVENTS].get());
    });
}

kvf_status kvf_check_lost(const kvf_engine * engine) {
    return kvf_check_servers(engine->servers);
}

kvf_status kvf_host_alloc(kvf_engine * engine, int64_t size, void ** data) {
    auto * dev  = engine->lanes.front().dev;
    auto * buft = dev ? ggml_backend_dev_host_buffer_type(dev) : nullptr;
    if (!buft) {
        buft = ggml_backend_cpu_buffer_type();
    }
    // the gap keeps images of two allocations from lying side by side: a copy across them is refused by CUDA
    ggml_backend_buffer_ptr buffer { ggml_backend_buft_alloc_buffer(buft, size + HOST_GAP) };
    if (!buffer) {
        return kvf_fail(KVF_STATUS_MEMORY, "no host memory for %lld bytes", (long long) size);
    }
    *data = ggml_backend_buffer_get_base(buffer.get());
    std::lock_guard<std::mutex> lock(engine->host_mutex);
    engine->host.push_back(std::move(buffer));
    return KVF_STATUS_SUCCESS;
}

void kvf_host_free(kvf_engine * engine, void * data) {
    std::lock_guard<std::mutex> lock(engine->host_mutex);
    auto & host = engine->host;
    host.erase(std::remove_if(host.begin(), host.end(), [data](const auto & buffer) {
        return ggml_backend_buffer_get_base(buffer.get()) == data;
    }), host.end());
}
