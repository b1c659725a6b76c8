// What keeps exceptions in libkvf_chat, and reads its JSON.
#pragma once

#include "kvf_chat.h"

#include "json.h"

#include <exception>
#include <new>
#include <string>

// Keeps the text for kvf_chat_last_error() of this thread.
void kvf_chat_fail(const char * text);

// The parameters of a tool for its grammar, which the prompt does not show; null for those that the prompt shows.
const common_json * kvf_chat_parameters(const std::string & tool);

// Runs `work`: KVF_CHAT_STATUS_SUCCESS, or `status` for what it throws.
template <typename Work> int32_t kvf_chat_guarded(int32_t status, Work && work) {
    try {
        work();
        return KVF_CHAT_STATUS_SUCCESS;
    } catch (const std::bad_alloc &) {
        kvf_chat_fail("there is no memory");
        return KVF_CHAT_STATUS_MEMORY;
    } catch (const std::exception & error) {
        kvf_chat_fail(error.what());
    } catch (...) {
        kvf_chat_fail("an exception that is none of the standard library's");
    }
    return status;
}

// JSON of at most KVF_CHAT_BYTES bytes. Throws.
inline common_json kvf_chat_json(const char * data, size_t size) {
    if (size > KVF_CHAT_BYTES) {
        throw std::length_error("there are " + std::to_string(size) + " bytes, and " + std::to_string(KVF_CHAT_BYTES) + " is the most");
    }
    return common_json::parse(std::string(data, size));
}
