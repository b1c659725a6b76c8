// Turns an assertion of ggml into an exception: in libmtmd, while llama.cpp loads a model or makes a context, and while a step
// builds its graph and sets its inputs.
#pragma once

#include <stdexcept>

// What an assertion throws where a kvf_guard lives.
struct kvf_asserted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// While one lives, an assertion of ggml on this thread throws. Nothing may be computed meanwhile, since threads of a step would
// wait for the one that has left. It passes ggml's C, which has nothing to clean up. kvf_guard_reason() tells what was thrown last.
struct kvf_guard {
    kvf_guard() { begin(); }
    ~kvf_guard() { end(); }
    kvf_guard(const kvf_guard &)             = delete;
    kvf_guard & operator=(const kvf_guard &) = delete;

    void begin();
    void end();

  private:
    bool on = false;
};

// Note why a file is refused, for kvf_guard_reason().
void kvf_refuse(const char * reason);
