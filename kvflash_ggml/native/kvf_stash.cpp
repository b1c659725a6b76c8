// A state is kept where it is, and put back: copies from device to device, in the order of the compute.
#include "kvf_stash.h"

#include "kvf_engine.h"
#include "kvf_error.h"
#include "kvf_state.h"

#include "llama-io.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace {

size_t area_of(kvf_stash & stash, const ggml_tensor * tensor) {
    auto *     buft = ggml_backend_buffer_get_type(tensor->buffer);
    auto &     all  = stash.areas;
    const auto same = std::find_if(all.begin(), all.end(), [buft](const auto & a) { return a.buft == buft; });
    if (same != all.end()) {
        return same - all.begin();
    }
    all.push_back({ buft, nullptr });
    return all.size() - 1;
}

// Finds a place for each piece of a state; nothing is copied yet, since there may be no room.
class planner : public llama_io_write_i {
public:
    explicit planner(kvf_stash & stash) : stash(stash) {}

    void write(const void * src, size_t n) override {
        const auto * bytes = (const uint8_t *) src;
        stash.small.insert(stash.small.end(), bytes, bytes + n);
        stash.size += n;
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        const auto area = area_of(stash, tensor);
        auto &     a    = stash.areas[area];
        stash.pieces.push_back({ tensor, offset, n, area, a.used });
        a.used     += GGML_PAD(n, ggml_backend_buft_get_alignment(a.buft));
        stash.size += n;
    }

    size_t n_bytes() override { return stash.size; }

private:
    kvf_stash & stash;
};

bool make_room(kvf_engine & engine, kvf_stash & stash) {
    for (auto & a : stash.areas) {
        if (a.used <= (a.buffer ? ggml_backend_buffer_get_size(a.buffer.get()) : 0)) {
            continue;
        }
        llama_synchronize(&engine.ctx);  // the last state may still be on its way
        a.buffer.reset();
        a.buffer.reset(ggml_backend_buft_alloc_buffer(a.buft, a.used));
        if (!a.buffer) {
            return false;
        }
    }
    return true;
}

ggml_tensor * bytes_at(ggml_context * ctx, ggml_backend_buffer_t buffer, void * data, size_t n) {
    auto * res = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, n);
    ggml_backend_tensor_alloc(buffer, res, data);
    return res;
}

enum class direction { out, in };

// Between the piece's place and its tensor at this offset.
void copy(kvf_engine & engine, const kvf_stash & stash, const kvf_stash::piece & p, size_t offset, direction dir) {
    ggml_context_ptr ctx { ggml_init({ 2*ggml_tensor_overhead(), nullptr, /*.no_alloc =*/ true }) };
    auto * buffer = stash.areas[p.area].buffer.get();
    auto * kept   = bytes_at(ctx.get(), buffer, (char *) ggml_backend_buffer_get_base(buffer) + p.at, p.size);
    auto * cached = bytes_at(ctx.get(), p.tensor->buffer, (char *) p.tensor->data + offset, p.size);
    auto * from   = dir == direction::out ? cached : kept;
    auto * to     = dir == direction::out ? kept : cached;
    auto * backend = kvf_compute_of(engine, p.tensor);
    if (backend && !(engine.shares_host && ggml_backend_buffer_is_host(p.tensor->buffer))) {
        ggml_backend_tensor_copy_async(backend, backend, from, to);
    } else {
        llama_synchronize(&engine.ctx);
        ggml_backend_tensor_copy(from, to);
    }
}

// Tensors arrive behind the compute, everything else at once.
class reader : public llama_io_read_i {
public:
    reader(kvf_engine & engine, const kvf_stash & stash) : engine(engine), stash(stash) {}

    void read(void * dst, size_t n) override {
        if (n > stash.small.size() - n_small) {
            throw std::runtime_error("it has less beside its tensors");
        }
        memcpy(dst, stash.small.data() + n_small, n);
        n_small += n;
        n_read  += n;
    }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        if (n_pieces == stash.pieces.size() || stash.pieces[n_pieces].tensor != tensor || stash.pieces[n_pieces].size != n) {
            throw std::runtime_error("it has other tensors");
        }
        copy(engine, stash, stash.pieces[n_pieces++], offset, direction::in);
        n_read += n;
    }

    size_t n_bytes() override { return n_read; }

private:
    kvf_engine &      engine;
    const kvf_stash & stash;
    size_t            n_small  = 0;
    size_t            n_pieces = 0;
    size_t            n_read   = 0;
};

void forget(kvf_stash & stash) {
    stash.holds = false;
    stash.size  = 0;
    stash.small.clear();
    stash.pieces.clear();
    for (auto & a : stash.areas) {
        a.used = 0;
    }
}

}  // namespace

kvf_status kvf_state_keep(kvf_engine * engine, int32_t seq) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    auto & stash = engine->stashes[seq];
    forget(stash);
    try {
        planner io(stash);
        kvf_write_state(*engine, seq, io);
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_STATE, "the state cannot be kept: %s", err.what());
    }
    if (!make_room(*engine, stash)) {
        return kvf_fail(KVF_STATUS_MEMORY, "no memory to keep a state of %lld bytes beside the one at work",
                        (long long) stash.size);
    }
    for (const auto & p : stash.pieces) {
        copy(*engine, stash, p, p.offset, direction::out);
    }
    stash.holds = true;
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_state_put(kvf_engine * engine, int32_t seq, int32_t length) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    if (length < 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "a state for %d tokens", length);
    }
    const auto & stash = engine->stashes[seq];
    if (!stash.holds) {
        return kvf_fail(KVF_STATUS_STATE, "no state is kept that could be put back");
    }
    engine->tickets.compute_waits(engine->lanes, engine->compute_barrier);  // the state may still be on its way to the host
    reader io(*engine, stash);
    return kvf_restore_state(*engine, seq, io, stash.size, length);
}
