// Servers that devices of this process are on, and whether they still answer.
#pragma once

#include "kvf.h"

#include "ggml-backend.h"

#include <string>
#include <vector>

struct llama_context;

ggml_backend_dev_t       kvf_find_remote(const char * name);  // of the servers that are connected, or null
std::vector<std::string> kvf_endpoints(const llama_context & ctx);  // of all devices that compute for it

// LOST if one of them has left a message without an answer; it names the first that did.
kvf_status kvf_check_servers(const std::vector<std::string> & endpoints);

// Was everything answered that had been sent when the event was recorded? Waits for that.
bool kvf_event_sound(ggml_backend_event_t event);
