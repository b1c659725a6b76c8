// Failures of the seam: a status for the program, a text for people.
#pragma once

#include "kvf.h"

#ifdef __GNUC__
#define KVF_PRINTF(text, rest) __attribute__((format(printf, text, rest)))
#else
#define KVF_PRINTF(text, rest)
#endif

// Returns the status, and keeps the text for kvf_last_error() of this thread.
KVF_PRINTF(2, 3) kvf_status kvf_fail(kvf_status status, const char * format, ...);
