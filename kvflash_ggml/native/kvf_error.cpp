#include "kvf_error.h"

#include <cstdarg>
#include <cstdio>

namespace {

// of a thread, not of an engine: chunks are scored and host memory is allocated beside a decode
thread_local char last_error[512];

}  // namespace

kvf_status kvf_fail(kvf_status status, const char * format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(last_error, sizeof(last_error), format, args);
    va_end(args);
    return status;
}

const char * kvf_last_error(void) {
    return last_error;
}
