// What a session needs beside the pool to go on bit for bit: recurrent state, sliding windows, the last logits.
#include "kvf_state.h"

#include "kvf_device.h"
#include "kvf_engine.h"
#include "kvf_error.h"

#include "llama-impl.h"
#include "llama-io.h"
#include "llama-kv-cache-iswa.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-model.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

namespace {

// Counts when it has no room to write to. behind: tensors are copied beside the compute, see `only_beside`.
class writer : public llama_io_write_i {
public:
    writer(uint8_t * out, size_t size, const kvf_engine * behind = nullptr) : out(out), size(size), behind(behind) {}

    void write(const void * src, size_t n) override {
        if (auto * to = take(n)) {
            memcpy(to, src, n);
        }
    }

    void write_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        auto * to = take(n);
        if (behind) {
            const auto * lane = kvf_lane_beside(*behind, tensor);
            only_beside = only_beside && lane;
            if (lane && to) {
                kvf_lane_get(*lane, tensor, to, offset, n);
            }
        } else if (to) {
            ggml_backend_tensor_get(tensor, to, offset, n);
        }
    }

    bool only_beside = true;  // each tensor has a lane that copies so

    size_t n_bytes() override { return at; }

private:
    uint8_t * take(size_t n) {
        const size_t begin = at;
        at += n;
        if (!out) {
            return nullptr;
        }
        if (at > size) {
            throw std::runtime_error("the buffer is too small");
        }
        return out + begin;
    }

    uint8_t *          out;
    size_t             size;
    const kvf_engine * behind;
    size_t             at = 0;
};

class reader : public llama_io_read_i {
public:
    reader(const uint8_t * data, size_t size) : data(data), size(size) {}

    void read(void * dst, size_t n) override { memcpy(dst, take(n), n); }

    void read_tensor(ggml_tensor * tensor, size_t offset, size_t n) override {
        ggml_backend_tensor_set(tensor, take(n), offset, n);
    }

    size_t n_bytes() override { return at; }

private:
    const uint8_t * take(size_t n) {
        if (n > size - at) {
            throw std::runtime_error("the state is too short");
        }
        at += n;
        return data + at - n;
    }

    const uint8_t * data;
    size_t          size;
    size_t          at = 0;
};

// One cell of a sliding-window ring. A text token has the same position on every axis.
struct cell {
    int32_t pos;  // -1: empty
    int32_t token;
};

struct window_head {
    uint32_t head;   // where llama.cpp looks for the next free cell; SHARED in a window of several sequences
    uint32_t count;  // cells up to the last one in use; those of the sequence
};

constexpr uint32_t SHARED = UINT32_MAX;  // the cells are those of one sequence, and their places follow them

// Calls f(tensor, bytes of its first `count` cells).
template <typename F>
void for_each_tensor(llama_kv_cache & kv, uint32_t count, F && f) {
    for (const auto & layer : kvf_access::layers(kv)) {
        f(layer.k, count*layer.k->nb[1]);
        if (layer.v) {
            // transposed, the cells are columns
            f(layer.v, kvf_access::v_trans(kv) ? ggml_nbytes(layer.v) : count*layer.v->nb[1]);
        }
    }
}

// Calls f(first, n) for runs of numbers that follow one another, of which `place` has those of rows 0, 1, ...
template <typename F>
void for_each_run(const std::vector<uint32_t> & place, F && f) {
    for (size_t i = 0, n; i < place.size(); i += n) {
        for (n = 1; i + n < place.size() && place[i + n] == place[i] + n; ++n) {}
        f(place[i], n);
    }
}

// A cell of recurrent state, and so many of its rollback copies.
void zero_cell(const llama_memory_recurrent & memory, uint32_t cell, uint32_t planes) {
    for (const auto * tensors : { &memory.r_l, &memory.s_l, &memory.p_l }) {
        for (auto * t : *tensors) {
            for (uint32_t plane = 0; t && plane <= planes; ++plane) {
                kvf_zero(t, (plane*memory.size + cell)*t->nb[1], t->nb[1]);
            }
        }
    }
}

std::vector<uint32_t> cells_of(llama_kv_cache & kv, int32_t seq) {
    const auto & cells = kvf_access::cells(kv);
    std::vector<uint32_t> res;
    for (uint32_t i = 0; i < cells.used_max_p1(); ++i) {
        if (!cells.is_empty(i) && cells.seq_has(i, seq)) {
            res.push_back(i);
        }
    }
    return res;
}

void write_shared_window(llama_kv_cache & kv, llama_io_write_i & io, int32_t seq) {
    const auto & cells = kvf_access::cells(kv);
    const auto   place = cells_of(kv, seq);
    const window_head head { SHARED, (uint32_t) place.size() };
    io.write(&head, sizeof(head));
    for (const auto i : place) {
        const cell c { cells.pos_get(i), cells.ext_get(i).tok };
        io.write(&c, sizeof(c));
    }
    io.write(place.data(), place.size()*sizeof(place[0]));
    for_each_tensor(kv, 0, [&](ggml_tensor * t, size_t) {
        for_each_run(place, [&](uint32_t first, size_t n) { io.write_tensor(t, first*t->nb[1], n*t->nb[1]); });
    });
}

void write_window(llama_kv_cache & kv, llama_io_write_i & io) {
    const auto & cells = kvf_access::cells(kv);
    const window_head head { kvf_access::head(kv), cells.used_max_p1() };
    io.write(&head, sizeof(head));
    for (uint32_t i = 0; i < head.count; ++i) {
        const bool empty = cells.is_empty(i);
        const cell c { empty ? -1 : cells.pos_get(i), empty ? LLAMA_TOKEN_NULL : cells.ext_get(i).tok };
        io.write(&c, sizeof(c));
    }
    for_each_tensor(kv, head.count, [&](ggml_tensor * t, size_t n) { io.write_tensor(t, 0, n); });
}

// The sequences let go of what no token of theirs will see any more, if they do not go back.
void make_room(llama_kv_cache & kv, int32_t n_seq, int32_t n_swa) {
    for (int32_t seq = 0; seq < n_seq; ++seq) {
        const auto end = kv.seq_pos_max(seq) + 2 - n_swa;
        if (end > 0) {
            kv.seq_rm(seq, 0, end);
        }
    }
}

// Where cells come to lie: in their places, or where one of them is taken, in the first ones that are free.
std::vector<uint32_t> free_places(const kvf_engine & engine, llama_kv_cache & kv, const std::vector<uint32_t> & wanted) {
    const auto & cells = kvf_access::cells(kv);
    std::vector<bool> taken(cells.size());
    bool fit = true;
    for (const auto i : wanted) {
        fit = fit && i < cells.size() && cells.is_empty(i) && !taken[i];
        if (fit) {
            taken[i] = true;
        }
    }
    if (fit) {
        return wanted;
    }
    if (cells.size() - cells.get_used() < wanted.size()) {
        make_room(kv, engine.info.n_seq, engine.info.n_swa);
    }
    std::vector<uint32_t> res;
    for (uint32_t i = 0; i < cells.size() && res.size() < wanted.size(); ++i) {
        if (cells.is_empty(i)) {
            res.push_back(i);
        }
    }
    if (res.size() < wanted.size()) {
        throw std::runtime_error("more cells than the sliding window has left");
    }
    return res;
}

// A sequence brings no more cells than its part of a window that several have: the newest, of which it sees fewer.
void leave_out_oldest(std::vector<cell> & found, std::vector<uint32_t> & place, size_t most) {
    if (place.size() <= most) {
        return;
    }
    std::vector<int32_t> positions;
    for (const auto & c : found) {
        if (c.pos != -1) {
            positions.push_back(c.pos);
        }
    }
    std::nth_element(positions.begin(), positions.begin() + most, positions.end(), std::greater<>());
    const int32_t before = positions[most];
    std::vector<uint32_t> kept;
    size_t n = 0;
    for (auto & c : found) {
        if (c.pos == -1) {
            continue;
        }
        if (c.pos > before) {
            kept.push_back(place[n]);
        } else {
            c.pos = -1;
        }
        n++;
    }
    place = std::move(kept);
}

// Rows of a window, of which empty cells are left out.
void read_rows(llama_kv_cache & kv, llama_io_read_i & io, const std::vector<cell> & found, const std::vector<uint32_t> & place) {
    std::vector<uint8_t> empty;
    for_each_tensor(kv, 0, [&](ggml_tensor * t, size_t) {
        const size_t row = t->nb[1];
        for (size_t i = 0, at = 0, n; i < found.size(); i += n) {
            const bool used = found[i].pos != -1;
            for (n = 1; i + n < found.size() && (found[i + n].pos != -1) == used && (!used || place[at + n] == place[at] + n); ++n) {}
            if (used) {
                io.read_tensor(t, place[at]*row, n*row);
                at += n;
            } else {
                empty.resize(n*row);
                io.read(empty.data(), n*row);
            }
        }
    });
}

void read_window(kvf_engine & engine, llama_kv_cache & kv, llama_io_read_i & io, int32_t seq, int32_t length) {
    auto &     cells  = kvf_access::cells(kv);
    const bool shares = engine.info.n_seq > 1;
    window_head head;
    io.read(&head, sizeof(head));
    if (head.count > cells.size() || (head.head > cells.size() && head.head != SHARED)) {
        throw std::runtime_error("more cells than the sliding window has");
    }
    std::vector<bool>     seen(length);
    std::vector<cell>     found(head.count);
    std::vector<uint32_t> place;  // of the cells that are in use
    for (uint32_t i = 0; i < head.count; ++i) {
        auto & c = found[i];
        io.read(&c, sizeof(c));
        if (c.pos == -1 && head.head != SHARED) {
            continue;
        }
        if (c.pos < 0 || c.pos >= length || seen[c.pos]) {
            throw std::runtime_error("a position beside the text");
        }
        seen[c.pos] = true;
        place.push_back(i);
    }
    if (head.head == SHARED) {
        io.read(place.data(), place.size()*sizeof(place[0]));
    }
    if (shares) {
        leave_out_oldest(found, place, cells.size()/engine.info.n_seq);
    }
    place = free_places(engine, kv, place);
    size_t n = 0;
    for (const auto & c : found) {
        if (c.pos == -1) {
            continue;
        }
        llama_kv_cell_ext ext;
        ext.tok = c.token;
        if (engine.info.n_pos > 1) {
            ext.x = c.pos;
            ext.y = c.pos;
        }
        const auto i = place[n++];
        cells.pos_set(i, c.pos);
        cells.ext_set(i, ext);
        cells.seq_add(i, seq);
    }
    if (shares || head.head == SHARED) {
        read_rows(kv, io, found, place);
    } else {
        for_each_tensor(kv, head.count, [&](ggml_tensor * t, size_t n) { io.read_tensor(t, 0, n); });
        kvf_access::head(kv) = head.head;
    }
}

void read_state(kvf_engine & engine, int32_t seq, llama_io_read_i & io, int32_t length) {
    if (auto * iswa = kvf_find_iswa(&engine.memory)) {
        auto * window = iswa->get_swa();
        read_window(engine, *window, io, seq, length);
        if (window->seq_pos_max(seq) != length - 1) {
            throw std::runtime_error("a window that does not end where the text does");
        }
    }
    if (auto * recurrent = kvf_find_recurrent(&engine.memory)) {
        recurrent->state_read(io, seq, 0);
        if (recurrent->seq_pos_max(seq) != length - 1) {
            throw std::runtime_error("a recurrent state that does not end where the text does");
        }
    }
}

}  // namespace

llama_kv_cache_iswa * kvf_find_iswa(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_attn();
    }
    return dynamic_cast<llama_kv_cache_iswa *>(memory);
}

llama_memory_recurrent * kvf_find_recurrent(llama_memory_i * memory) {
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid_iswa *>(memory)) {
        return hybrid->get_mem_recr();
    }
    if (auto * hybrid = dynamic_cast<llama_memory_hybrid *>(memory)) {
        return hybrid->get_mem_recr();
    }
    return nullptr;
}

void kvf_zero_state(kvf_engine & engine, int32_t seq) {
    auto * recurrent = kvf_find_recurrent(&engine.memory);
    for (uint32_t i = 0; recurrent && engine.info.n_seq > 1 && i < recurrent->size; ++i) {
        if (recurrent->cells[i].has_seq_id(seq)) {
            zero_cell(*recurrent, i, 0);
        }
    }
}

void kvf_zero_cells(llama_kv_cache & kv) {
    const auto & cells = kvf_access::cells(kv);
    std::vector<uint32_t> place;
    for (uint32_t i = 0; i < cells.size(); ++i) {
        if (cells.is_empty(i)) {
            place.push_back(i);
        }
    }
    const bool v_trans = kvf_access::v_trans(kv);
    for (const auto & layer : kvf_access::layers(kv)) {
        for_each_run(place, [&](uint32_t first, size_t n) {
            kvf_zero(layer.k, first*layer.k->nb[1], n*layer.k->nb[1]);
            if (layer.v && !v_trans) {
                kvf_zero(layer.v, first*layer.v->nb[1], n*layer.v->nb[1]);
            }
            const size_t value = layer.v ? ggml_type_size(layer.v->type) : 0;
            for (int64_t i = 0; v_trans && layer.v && i < layer.v->ne[0]; ++i) {  // the cells are columns
                kvf_zero(layer.v, (i*cells.size() + first)*value, n*value);
            }
        });
    }
}

void kvf_zero_beside(kvf_engine & engine) {
    if (auto * iswa = kvf_find_iswa(&engine.memory)) {
        kvf_zero_cells(*iswa->get_swa());
    }
    auto * recurrent = kvf_find_recurrent(&engine.memory);
    for (uint32_t i = 0; recurrent && i < recurrent->size; ++i) {
        if (recurrent->cells[i].is_empty()) {
            zero_cell(*recurrent, i, recurrent->n_rs_seq);
        }
    }
}

void kvf_clear_state(kvf_engine & engine, int32_t seq) {
    const bool shares = engine.info.n_seq > 1;
    if (auto * iswa = kvf_find_iswa(&engine.memory)) {
        shares ? (void) iswa->get_swa()->seq_rm(seq, -1, -1) : iswa->get_swa()->clear(false);
    }
    if (auto * recurrent = kvf_find_recurrent(&engine.memory)) {
        shares ? (void) recurrent->seq_rm(seq, -1, -1) : recurrent->clear(false);
    }
}

void kvf_write_state(kvf_engine & engine, int32_t seq, llama_io_write_i & io) {
    if (auto * iswa = kvf_find_iswa(&engine.memory)) {
        if (engine.info.n_seq > 1) {
            write_shared_window(*iswa->get_swa(), io, seq);
        } else {
            write_window(*iswa->get_swa(), io);
        }
    }
    if (auto * recurrent = kvf_find_recurrent(&engine.memory)) {
        recurrent->state_write(io, seq, 0);
    }
}

kvf_status kvf_restore_state(kvf_engine & engine, int32_t seq, llama_io_read_i & io, size_t size, int32_t length) {
    kvf_clear_state(engine, seq);
    engine.reach[seq] = 0;  // the planes are still those of what was there before
    try {
        read_state(engine, seq, io, length);
        if (io.n_bytes() != size) {
            throw std::runtime_error("bytes are left over");
        }
        return KVF_STATUS_SUCCESS;
    } catch (const std::exception & err) {
        kvf_clear_state(engine, seq);
        return kvf_fail(KVF_STATUS_STATE, "a state of %lld bytes does not fit this context and %d tokens: %s",
                        (long long) size, length, err.what());
    }
}

kvf_status kvf_state_size(kvf_engine * engine, int32_t seq, int64_t * size) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    writer io(nullptr, 0);
    kvf_write_state(*engine, seq, io);
    *size = io.n_bytes();
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_state_get(kvf_engine * engine, int32_t seq, uint8_t * out, int64_t size, uint64_t * ticket) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    try {
        writer count(nullptr, 0, engine);
        kvf_write_state(*engine, seq, count);
        if (count.n_bytes() != (size_t) size) {
            throw std::runtime_error("it has " + std::to_string(count.n_bytes()));
        }
        if (!ticket || !count.only_beside) {
            llama_synchronize(&engine->ctx);
            writer io(out, size);
            kvf_write_state(*engine, seq, io);
            return kvf_check_lost(engine);
        }
        kvf_copies_wait(*engine);
        writer io(out, size, engine);
        kvf_write_state(*engine, seq, io);
    } catch (const std::exception & err) {
        return kvf_fail(KVF_STATUS_STATE, "the state could not be written to %lld bytes: %s", (long long) size, err.what());
    }
    *ticket = engine->compute_barrier = engine->tickets.begin(engine->lanes);
    engine->tickets.end(engine->lanes);
    return KVF_STATUS_SUCCESS;
}

kvf_status kvf_state_set(kvf_engine * engine, int32_t seq, const uint8_t * data, int64_t size, int32_t length) {
    if (const auto status = kvf_check_seq(*engine, seq)) {
        return status;
    }
    if (size < 0 || length < 0) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "a state of %lld bytes for %d tokens", (long long) size, length);
    }
    kvf_synchronize(engine);
    kvf_zero_state(*engine, seq);
    reader io(data, size);
    return kvf_restore_state(*engine, seq, io, size, length);
}

bool kvf_access::set_logits(llama_context & ctx, const float * row) {
    if (ctx.output_reserve(1) == 0) {
        return false;
    }
    memcpy(ctx.logits.data, row, ctx.get_model().vocab.n_tokens()*sizeof(float));
    ctx.output_ids[0] = 0;
    ctx.n_outputs     = 1;
    ctx.output_swaps.clear();
    return true;
}

kvf_status kvf_logits_set(kvf_engine * engine, const float * row, int32_t n_vocab) {
    const int32_t most = engine->ctx.get_model().vocab.n_tokens();
    if (n_vocab != most) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "logits of %d tokens, the vocabulary has %d", n_vocab, most);
    }
    kvf_synchronize(engine);
    engine->features.n_rows = 0;  // the outputs of a step lie where these go
    return kvf_access::set_logits(engine->ctx, row) ? KVF_STATUS_SUCCESS
                                                    : kvf_fail(KVF_STATUS_MEMORY, "no memory for the logits of a token");
}
