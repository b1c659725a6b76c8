// When transfers are done: one number for all lanes, and behind it an event of each.
#pragma once

#include "ggml-cpp.h"

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

struct kvf_lane;

// The transfers of one ticket.
struct kvf_mark {
    std::vector<ggml_backend_event_ptr>  done;  // of each lane, null where transfers are plain copies
    std::vector<std::unique_ptr<char[]>> kept;  // host memory that they read
    int32_t holders = 0;
};

// Any thread may wait for a ticket while another one submits transfers. So an event is recorded once more only when nobody
// waits for it: each of the newest tickets has a mark of its own, and whoever waits holds on to one.
class kvf_tickets {
public:
    // A transfer begins, and takes the next number. One thread only, for this and what follows until `wait`.
    uint64_t begin(const std::vector<kvf_lane> & lanes);

    // Memory for n values that the transfer may read until it is done.
    template <typename T>
    T * keep(size_t n) {
        auto & kept = current->kept;
        kept.emplace_back(new char[n*sizeof(T)]);
        return (T *) kept.back().get();
    }

    // All of it has been submitted.
    void end(const std::vector<kvf_lane> & lanes);

    // What these lanes compute from here on comes after the transfer.
    void compute_waits(const std::vector<kvf_lane> & lanes, uint64_t ticket);

    // Return when the transfer is done, or a later one.
    void wait(uint64_t ticket);

    // Was it done before a server was lost? Waits for servers only.
    bool is_sound(const std::vector<kvf_lane> & lanes, uint64_t ticket);

    uint64_t last() const { return newest; }

private:
    static constexpr uint64_t N_MARKS = 64;

    kvf_mark * hold(uint64_t ticket);
    void       release(kvf_mark * mark);

    uint64_t   newest  = 0;
    kvf_mark * current = nullptr;

    std::mutex                             mutex;  // of what follows
    std::vector<std::unique_ptr<kvf_mark>> marks;
    std::array<kvf_mark *, N_MARKS>        of {};  // of ticket t, at t % N_MARKS
    std::vector<kvf_mark *>                idle;
    uint64_t                               sound = 0;  // this one and those before it were, and have no mark any more
};
