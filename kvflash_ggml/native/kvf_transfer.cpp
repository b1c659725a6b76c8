// Moves whole blocks between the pool and host memory.
#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_remote.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
#include <thread>

namespace {

constexpr int64_t HOST_GAP         = 64;         // bytes after each host allocation
constexpr int64_t BYTES_A_THREAD   = 256*1024;   // a thread begins in the time of such a copy
constexpr int32_t MAX_HOST_THREADS = 16;

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

// Every n_parts-th span, from one of them on.
void copy_spans(const kvf_lane & lane, size_t part, size_t n_parts, const std::vector<run> & runs, size_t page_bytes, direction dir) {
    for (size_t i = part; i < lane.spans.size(); i += n_parts) {
        for (const auto & r : runs) {
            copy_span(lane, lane.spans[i], r, page_bytes, dir);
        }
    }
}

// Within host memory, on as many threads as compute there: one alone does not fill its bus.
void copy_on_host(const kvf_engine & engine, const kvf_lane & lane, int32_t n, const std::vector<run> & runs, direction dir) {
    const int32_t limit     = std::clamp(llama_n_threads(&engine.ctx), 1, MAX_HOST_THREADS);
    const size_t  n_threads = std::clamp<int64_t>(n*lane.share_bytes/BYTES_A_THREAD, 1, limit);
    std::vector<std::thread> threads;
    size_t part = 1;
    try {
        for (; part < n_threads; ++part) {
            threads.emplace_back(copy_spans, std::cref(lane), part, n_threads, std::cref(runs), engine.info.page_bytes, dir);
        }
    } catch (const std::exception &) {  // the system has no more threads: this one does their work
    }
    copy_spans(lane, 0, n_threads, runs, engine.info.page_bytes, dir);
    for (; part < n_threads; ++part) {
        copy_spans(lane, part, n_threads, runs, engine.info.page_bytes, dir);
    }
    for (auto & thread : threads) {
        thread.join();
    }
}

// Is it worth it to move whole images, and to spread or collect them on the device? Not for one run of blocks: a copy per span
// moves all of it. A server has no such copies.
bool is_staged(const kvf_lane & lane, size_t n_runs, direction dir) {
    return lane.stage && (lane.mode == KVF_MODE_REMOTE ? dir == direction::out : n_runs > 1);
}

bool has_remote(const kvf_engine & engine) {
    return std::any_of(engine.lanes.begin(), engine.lanes.end(), [](const auto & lane) { return lane.mode == KVF_MODE_REMOTE; });
}

uint64_t transfer(kvf_engine & engine, int32_t n, const int32_t * block, const uint64_t * image, direction dir) {
    const auto runs   = find_runs(n, block, image, engine.info.page_bytes);
    const auto ticket = engine.tickets.begin(engine.lanes);
    if (runs.size() > 1) {
        block = std::copy_n(block, n, engine.tickets.keep<int32_t>(n)) - n;
    }
    std::vector<const kvf_lane *> staged, others;
    for (const auto * lane : engine.by_mode) {
        (is_staged(*lane, runs.size(), dir) ? staged : others).push_back(lane);
    }
    for (const auto * lane : staged) {
        kvf_lane_follow(engine, *lane);
    }
    for (int32_t i = 0; i < n; i += KVF_STAGED_PAGES) {  // in turn: no device waits until all is submitted to another
        for (const auto * lane : staged) {
            auto * move = dir == direction::in ? kvf_staging_page_in : kvf_staging_page_out;
            move(*lane, std::min(n - i, KVF_STAGED_PAGES), block + i, image + i);
        }
    }
    for (const auto * lane : others) {
        kvf_lane_follow(engine, *lane);
        if (lane->mode == KVF_MODE_HOST) {
            copy_on_host(engine, *lane, n, runs, dir);
        } else {
            copy_spans(*lane, 0, 1, runs, engine.info.page_bytes, dir);
        }
    }
    engine.tickets.end(engine.lanes);
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
    for (const auto * lane : engine.by_mode) {
        kvf_lane_follow(engine, *lane);
    }
}

void kvf_images_wait(kvf_engine & engine, int32_t n, const uint64_t * image) {
    uint64_t last = 0;
    for (int32_t i = 0; i < n && !engine.written.empty(); ++i) {
        const auto found = engine.written.find(image[i]);
        last = std::max(last, found == engine.written.end() ? 0 : found->second);
    }
    engine.tickets.wait(last);
}

kvf_status kvf_page_out(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image, uint64_t * ticket) {
    if (const auto status = check_pages(*engine, n, block, image)) {
        return status;
    }
    *ticket = transfer(*engine, n, block, image, direction::out);
    if (has_remote(*engine)) {
        for (int32_t i = 0; i < n; ++i) {
            engine->written[image[i]] = *ticket;
        }
    }
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_page_in(kvf_engine * engine, int32_t n, const int32_t * block, const uint64_t * image, uint64_t * ticket) {
    if (const auto status = check_pages(*engine, n, block, image)) {
        return status;
    }
    kvf_images_wait(*engine, n, image);
    *ticket = engine->compute_barrier = transfer(*engine, n, block, image, direction::in);
    return KVF_STATUS_SUCCESS;
}

void kvf_wait(kvf_engine * engine, uint64_t ticket) {
    engine->tickets.wait(ticket);
}

int kvf_sound(kvf_engine * engine, uint64_t ticket) {
    return engine->tickets.is_sound(engine->lanes, ticket);
}

kvf_status kvf_check_lost(const kvf_engine * engine) {
    return kvf_check_servers(engine->servers);
}

kvf_status kvf_host_alloc(kvf_engine * engine, int64_t size, void ** data) {
    // the gap keeps images of two allocations from lying side by side: a copy across them is refused by CUDA
    ggml_backend_buffer_ptr buffer { ggml_backend_buft_alloc_buffer(engine->host_buft, size + HOST_GAP) };
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
