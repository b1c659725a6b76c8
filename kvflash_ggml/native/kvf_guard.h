// Turns an assertion of ggml into an exception: in libmtmd, and while llama.cpp loads a model or makes a context.
#pragma once

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
