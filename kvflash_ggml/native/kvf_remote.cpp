// Devices of ggml's RPC servers. They are not registered with ggml: a model gets them only if it is asked for.
#include "kvf_remote.h"

#include "kvf_device.h"
#include "kvf_error.h"

#include "ggml-cpp.h"
#include "llama-context.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

namespace {

struct connection {
    int              users = 0;
    ggml_backend_ptr open;  // the connection lasts as long as somebody has a backend of it
};

std::mutex                        connections_mutex;
std::map<std::string, connection> connections;

template <typename F> F * rpc_function(const char * name) {
    auto * reg = ggml_backend_reg_by_name("RPC");
    return reg ? (F *) ggml_backend_reg_get_proc_address(reg, name) : nullptr;
}

// -1 no connection, 0 it answers, 1 lost
int state_of(const std::string & endpoint) {
    auto * state = rpc_function<int(const char *)>("ggml_backend_rpc_state");
    return state ? state(endpoint.c_str()) : -1;
}

ggml_backend_reg_t add_server(const char * endpoint) {
    auto * add = rpc_function<ggml_backend_reg_t(const char *)>("ggml_backend_rpc_add_server");
    return add ? add(endpoint) : nullptr;
}

kvf_status not_built() {
    return kvf_fail(KVF_STATUS_UNSUPPORTED, "this build has no RPC backend (GGML_RPC=OFF)");
}

kvf_status connect(const char * endpoint, connection & c) {
    auto * reg = add_server(endpoint);
    if (reg) {
        c.open.reset(ggml_backend_dev_init(ggml_backend_reg_dev_get(reg, 0), nullptr));
    }
    bool complete = reg && c.open;
    for (size_t i = 0; complete && i < ggml_backend_reg_dev_count(reg); ++i) {
        complete = ggml_backend_dev_buffer_type(ggml_backend_reg_dev_get(reg, i)) != nullptr;
    }
    if (!complete || state_of(endpoint) != 0) {
        return kvf_fail(KVF_STATUS_LOST, "%s", endpoint);
    }
    return KVF_STATUS_SUCCESS;
}

}  // namespace

std::vector<std::string> kvf_endpoints(const llama_context & ctx) {
    std::vector<std::string> res;
    auto * sched = ctx.get_sched();
    for (int i = 0; i < ggml_backend_sched_get_n_backends(sched); ++i) {
        auto * dev = ggml_backend_get_device(ggml_backend_sched_get_backend(sched, i));
        if (strcmp(kvf_backend_name(dev), "RPC") == 0) {
            res.push_back(ggml_backend_dev_description(dev));
        }
    }
    res.erase(std::unique(res.begin(), res.end()), res.end());
    return res;
}

kvf_status kvf_check_servers(const std::vector<std::string> & endpoints) {
    for (const auto & endpoint : endpoints) {
        if (state_of(endpoint) != 0) {
            return kvf_fail(KVF_STATUS_LOST, "%s", endpoint.c_str());
        }
    }
    return KVF_STATUS_SUCCESS;
}

bool kvf_event_sound(ggml_backend_event_t event) {
    auto * lost = rpc_function<bool(ggml_backend_event_t)>("ggml_backend_rpc_event_lost");
    ggml_backend_event_synchronize(event);
    return lost && !lost(event);
}

int kvf_rpc_state(const char * endpoint) {
    return state_of(endpoint);
}

kvf_status kvf_rpc_open(const char * endpoint) {
    if (!rpc_function<void>("ggml_backend_rpc_add_server")) {
        return not_built();
    }
    std::lock_guard<std::mutex> lock(connections_mutex);
    auto & c = connections[endpoint];
    const auto status = c.users == 0 ? connect(endpoint, c) : kvf_check_servers({ endpoint });
    if (status && c.users == 0) {
        connections.erase(endpoint);
    } else if (!status) {
        c.users++;
    }
    return status;
}

void kvf_rpc_close(const char * endpoint) {
    std::lock_guard<std::mutex> lock(connections_mutex);
    const auto found = connections.find(endpoint);
    if (found != connections.end() && --found->second.users == 0) {
        connections.erase(found);
    }
}

ggml_backend_dev_t kvf_find_remote(const char * name) {
    std::lock_guard<std::mutex> lock(connections_mutex);
    for (const auto & [endpoint, c] : connections) {
        auto * reg = add_server(endpoint.c_str());
        for (size_t i = 0; reg && i < ggml_backend_reg_dev_count(reg); ++i) {
            auto * dev = ggml_backend_reg_dev_get(reg, i);
            if (strcmp(ggml_backend_dev_name(dev), name) == 0) {
                return dev;
            }
        }
    }
    return nullptr;
}

int32_t kvf_rpc_devices(const char * endpoint, kvf_device * devices, int32_t n) {
    auto * reg = add_server(endpoint);
    const int32_t count = reg ? ggml_backend_reg_dev_count(reg) : 0;
    for (int32_t i = 0; i < std::min(n, count); ++i) {
        devices[i] = kvf_describe_device(ggml_backend_reg_dev_get(reg, i));
    }
    return count;
}

kvf_status kvf_rpc_serve(const char * endpoint, int32_t n_threads, const char * cache, int32_t n, const char * const * device) {
    using start_server = void(const char *, const char *, size_t, size_t, ggml_backend_dev_t *);
    auto * start = rpc_function<start_server>("ggml_backend_rpc_start_server");
    if (!start) {
        return not_built();
    }
    std::vector<ggml_backend_dev_t> devices;
    for (int32_t i = 0; i < n; ++i) {
        devices.push_back(ggml_backend_dev_by_name(device[i]));
        if (!devices.back()) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "this machine has no device %s", device[i]);
        }
    }
    start(endpoint, cache, n_threads, devices.size(), devices.data());  // returns only if it cannot listen
    return kvf_fail(KVF_STATUS_LOST, "%s", endpoint);
}
