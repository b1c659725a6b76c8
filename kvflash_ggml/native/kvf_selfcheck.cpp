// Does this CPU compute the same with weights that are packed for its kernels as with plain ones?
#include "kvf_error.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace {

constexpr int64_t WIDTH     = 512;  // two of the largest blocks
constexpr int64_t ROWS      = 64;   // more than one tile of any kernel
constexpr int     TOKENS[]  = { 1, 4, 32 };  // kernels for vectors, for a few rows, and for tiles of them
constexpr int     N_THREADS = 2;   // each has to be prepared for its kernels
constexpr double  TOLERANCE = 1e-2;

ggml_backend_dev_t cpu() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

void * proc_address(const char * name) {
    return ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), name);
}

// All of them; the last one is null.
ggml_backend_buffer_type_t * extra_buffer_types() {
    static ggml_backend_buffer_type_t none = nullptr;
    if (!cpu()) {
        return &none;
    }
    const auto get = (ggml_backend_dev_get_extra_bufts_t) proc_address("ggml_backend_dev_get_extra_bufts");
    return get ? get(cpu()) : &none;
}

ggml_backend_buffer_type_t extra_buffer_type(int32_t i) {
    auto * buft = extra_buffer_types();
    while (*buft && i-- > 0) {
        ++buft;
    }
    return *buft;
}

std::vector<float> noise(size_t n) {
    std::mt19937 source(n);
    std::vector<float> res(n);
    for (auto & x : res) {
        x = (int32_t) source()/2147483648.0f;  // a distribution of the library would differ from one to the next
    }
    return res;
}

ggml_context_ptr make_context() {
    return ggml_context_ptr { ggml_init({ 8*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, /*.no_alloc =*/ true }) };
}

// Would a model's loader put weights of that type there? It asks in the same way.
bool takes(ggml_backend_buffer_type_t buft, ggml_type type) {
    auto ctx = make_context();
    auto * weight = ggml_new_tensor_2d(ctx.get(), type, WIDTH, ROWS);
    auto * op     = ggml_mul_mat(ctx.get(), weight, ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, WIDTH, TOKENS[0]));
    ggml_backend_buffer_ptr buffer { ggml_backend_buft_alloc_buffer(buft, 0) };
    weight->buffer = buffer.get();
    return ggml_backend_dev_supports_op(cpu(), op);
}

// The product of the weights and of so many tokens, with the weights in a buffer of that type. Empty: no memory, or a failure.
std::vector<float> product(ggml_backend_t backend, ggml_backend_buffer_type_t buft, ggml_type type,
                           const std::vector<uint8_t> & weights, const std::vector<float> & tokens) {
    auto packed = make_context();
    auto plain  = make_context();
    auto * weight = ggml_new_tensor_2d(packed.get(), type, WIDTH, ROWS);
    auto * input  = ggml_new_tensor_2d(plain.get(), GGML_TYPE_F32, WIDTH, tokens.size()/WIDTH);
    auto * output = ggml_mul_mat(plain.get(), weight, input);
    ggml_backend_buffer_ptr buffers[] {
        ggml_backend_buffer_ptr { ggml_backend_alloc_ctx_tensors_from_buft(packed.get(), buft) },
        ggml_backend_buffer_ptr { ggml_backend_alloc_ctx_tensors(plain.get(), backend) },
    };
    if (!buffers[0] || !buffers[1]) {
        return {};
    }
    // as a loader does it: what holds weights may be computed in another way
    ggml_backend_buffer_set_usage(buffers[0].get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    ggml_backend_tensor_set(weight, weights.data(), 0, weights.size());
    ggml_backend_tensor_set(input, tokens.data(), 0, ggml_nbytes(input));
    auto * graph = ggml_new_graph(plain.get());
    ggml_build_forward_expand(graph, output);
    std::vector<float> res(ggml_nelements(output));
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        return {};
    }
    ggml_backend_tensor_get(output, res.data(), 0, ggml_nbytes(output));
    return res;
}

// Not a number is no small error.
double relative_error(const std::vector<float> & a, const std::vector<float> & b) {
    double off = 0;
    double all = 0;
    for (size_t i = 0; i < b.size(); ++i) {
        off += (double) (a[i] - b[i])*(a[i] - b[i]);
        all += (double) b[i]*b[i];
    }
    return std::sqrt(off/all);
}

kvf_status compare(ggml_backend_t backend, ggml_backend_buffer_type_t buft, ggml_type type) {
    const auto values = noise(WIDTH*ROWS);
    const std::vector<float> importance(WIDTH, 1.0f);  // some types ask for it
    std::vector<uint8_t> weights(ggml_row_size(type, WIDTH)*ROWS);
    ggml_quantize_chunk(type, values.data(), weights.data(), 0, ROWS, WIDTH, importance.data());
    for (const int n : TOKENS) {
        const auto tokens   = noise(WIDTH*n);
        const auto expected = product(backend, ggml_backend_dev_buffer_type(cpu()), type, weights, tokens);
        const auto got      = product(backend, buft, type, weights, tokens);
        if (got.empty() || expected.empty()) {
            return kvf_fail(KVF_STATUS_MEMORY, "no memory to multiply %d tokens with %s", n, ggml_type_name(type));
        }
        const double error = relative_error(got, expected);
        if (!(error <= TOLERANCE)) {
            return kvf_fail(KVF_STATUS_DECODE, "%s weights in a buffer of type %s, %d tokens: off by %.2g, allowed is %.2g",
                            ggml_type_name(type), ggml_backend_buft_name(buft), n, error, TOLERANCE);
        }
    }
    return KVF_STATUS_SUCCESS;
}

}  // namespace

const char * kvf_selfcheck_name(int32_t buffer) {
    auto * buft = extra_buffer_type(buffer);
    return buft ? ggml_backend_buft_name(buft) : nullptr;
}

kvf_status kvf_selfcheck(int32_t buffer, int32_t * n_types) {
    auto * buft = extra_buffer_type(buffer);
    if (!buft) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the CPU has no extra buffer type %d", buffer);
    }
    ggml_backend_ptr backend { ggml_backend_dev_init(cpu(), nullptr) };
    if (!backend) {
        return kvf_fail(KVF_STATUS_MEMORY, "no CPU backend could be made");
    }
    ((ggml_backend_set_n_threads_t) proc_address("ggml_backend_set_n_threads"))(backend.get(), N_THREADS);
    *n_types = 0;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = (ggml_type) i;
        if (!ggml_is_quantized(type) && type != GGML_TYPE_F32 && type != GGML_TYPE_F16 && type != GGML_TYPE_BF16) {
            continue;  // numbers that no weight is of, and types that are no more
        }
        if (ggml_blck_size(type) > 0 && takes(buft, type)) {
            if (const auto status = compare(backend.get(), buft, type)) {
                return status;
            }
            ++*n_types;
        }
    }
    return KVF_STATUS_SUCCESS;
}
