// Keeps llama.cpp from ending the process over a file that somebody else has made.
#include "kvf_guard.h"

#include "ggml.h"
#include "kvf.h"

#include <cstdio>
#include <mutex>
#include <string>

namespace {

std::mutex            mutex;
int                   guards;  // of all threads
ggml_abort_callback_t before;

thread_local int         guarded;
thread_local std::string refused;

void on_abort(const char * message) {
    if (guarded > 0) {
        const std::string text = message;
        kvf_refuse(text.substr(text.rfind('/', text.find(": ")) + 1).c_str());  // without the folder of its source
        throw kvf_asserted(refused);
    }
    if (before) {
        before(message);
    } else {
        fprintf(stderr, "%s\n", message);
    }
}

}  // namespace

void kvf_guard::begin() {
    const std::lock_guard<std::mutex> lock(mutex);
    on = true;
    if (guarded++ == 0) {
        refused.clear();  // of an earlier call, where nobody has asked
    }
    if (guards++ == 0) {
        before = ggml_set_abort_callback(on_abort);
    }
}

void kvf_guard::end() {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!on) {
        return;
    }
    on = false;
    guarded--;
    if (--guards == 0) {
        ggml_set_abort_callback(before);
    }
}

const char * kvf_guard_reason(void) {
    thread_local std::string told;
    told.swap(refused);
    refused.clear();
    return told.c_str();
}

void kvf_refuse(const char * reason) {
    refused = reason;
    while (!refused.empty() && refused.back() == '\n') {
        refused.pop_back();
    }
}
