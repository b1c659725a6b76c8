#include "kvf_ticket.h"

#include "kvf_lane.h"
#include "kvf_remote.h"

#include <algorithm>
#include <utility>

namespace {

std::unique_ptr<kvf_mark> make_mark(const std::vector<kvf_lane> & lanes) {
    auto mark = std::make_unique<kvf_mark>();
    for (const auto & lane : lanes) {
        mark->done.emplace_back(lane.copy ? ggml_backend_event_new(lane.dev) : nullptr);
    }
    return mark;
}

void synchronize(const kvf_mark & mark) {
    for (const auto & event : mark.done) {
        if (event) {
            ggml_backend_event_synchronize(event.get());
        }
    }
}

// Has every server answered?
bool is_answered(const std::vector<kvf_lane> & lanes, const kvf_mark & mark) {
    for (size_t i = 0; i < lanes.size(); ++i) {
        if (lanes[i].mode == KVF_MODE_REMOTE && !kvf_event_sound(mark.done[i].get())) {
            return false;
        }
    }
    return true;
}

}  // namespace

uint64_t kvf_tickets::begin(const std::vector<kvf_lane> & lanes) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (idle.empty()) {
            marks.push_back(make_mark(lanes));
            current = marks.back().get();
        } else {
            current = idle.back();
            idle.pop_back();
        }
        current->holders = 1;
    }
    if (!current->kept.empty()) {
        synchronize(*current);  // as a rule its transfers were done long ago
        current->kept.clear();
    }
    return ++newest;
}

void kvf_tickets::end(const std::vector<kvf_lane> & lanes) {
    for (size_t i = 0; i < lanes.size(); ++i) {
        if (lanes[i].copy) {
            ggml_backend_event_record(current->done[i].get(), lanes[i].copy.get());
        }
    }
    kvf_mark * old = nullptr;
    {
        std::lock_guard<std::mutex> lock(mutex);
        old = std::exchange(of[newest % N_MARKS], current);
    }
    if (old) {
        const bool answered = is_answered(lanes, *old);
        release(old);
        std::lock_guard<std::mutex> lock(mutex);
        sound = answered ? std::max(sound, newest - N_MARKS) : sound;
    }
    current = nullptr;
}

void kvf_tickets::compute_waits(const std::vector<kvf_lane> & lanes, uint64_t ticket) {
    auto * mark = hold(ticket);
    if (!mark) {
        return;
    }
    for (size_t i = 0; i < lanes.size(); ++i) {
        if (lanes[i].copy) {
            ggml_backend_event_wait(lanes[i].compute, mark->done[i].get());
        }
    }
    release(mark);
}

void kvf_tickets::wait(uint64_t ticket) {
    if (auto * mark = hold(ticket)) {
        synchronize(*mark);
        release(mark);
    }
}

bool kvf_tickets::is_sound(const std::vector<kvf_lane> & lanes, uint64_t ticket) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (ticket <= sound) {
            return true;
        }
    }
    auto *     mark = hold(ticket);
    const bool res  = !mark || is_answered(lanes, *mark);
    if (mark) {
        release(mark);
    }
    return res;
}

// The mark of a ticket, or of a later one that has taken its place: the transfers of a lane are done in their order, so that is
// only stricter.
kvf_mark * kvf_tickets::hold(uint64_t ticket) {
    if (ticket == 0) {
        return nullptr;
    }
    std::lock_guard<std::mutex> lock(mutex);
    auto * mark = of[ticket % N_MARKS];
    if (mark) {
        mark->holders++;
    }
    return mark;
}

void kvf_tickets::release(kvf_mark * mark) {
    std::lock_guard<std::mutex> lock(mutex);
    if (--mark->holders == 0) {
        idle.push_back(mark);
    }
}
