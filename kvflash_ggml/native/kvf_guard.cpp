// ggml ends the process where an assertion fails. While a thread loads a stranger's file, its assertions throw instead: all
// loaders of llama.cpp and mtmd catch std::exception, free what there is, and fail. Nothing may be computed meanwhile, since
// threads of a step would wait for the one that has left.
#include "kvf.h"

#include "ggml.h"

#include <cstdio>
#include <mutex>
#include <stdexcept>
#include <string>

namespace {

std::mutex            mutex;
int                   guards;  // of all threads
ggml_abort_callback_t before;

thread_local int         guarded;
thread_local std::string failed;

void on_abort(const char * message) {
    if (guarded > 0) {
        failed = message;
        throw std::runtime_error(failed);
    }
    fprintf(stderr, "%s\n", message);
}

}  // namespace

void kvf_guard_begin(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (guarded++ == 0) {
        failed.clear();
    }
    if (guards++ == 0) {
        before = ggml_set_abort_callback(on_abort);
    }
}

const char * kvf_guard_end(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    guarded--;
    if (--guards == 0) {
        ggml_set_abort_callback(before);
    }
    return failed.c_str();
}
