// A state that is kept on the devices that it is on.
#pragma once

#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>
#include <vector>

struct kvf_stash {
    // Room in one kind of memory.
    struct area {
        ggml_backend_buffer_type_t buft;
        ggml_backend_buffer_ptr    buffer;    // null before it is needed
        size_t                     used = 0;  // bytes
    };

    // Bytes of a tensor, and where they are kept.
    struct piece {
        ggml_tensor * tensor;
        size_t        offset;
        size_t        size;
        size_t        area;
        size_t        at;
    };

    std::vector<area>    areas;
    std::vector<piece>   pieces;
    std::vector<uint8_t> small;         // what is in no tensor
    size_t               size  = 0;     // of all of it
    bool                 holds = false;
};
