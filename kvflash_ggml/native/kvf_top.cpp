// The likeliest tokens of rows of logits: what samplers, and a drafter, need of a vocabulary.
#include "kvf_candidates.h"
#include "kvf_device.h"
#include "kvf_error.h"
#include "kvf_pool.h"

#include "llama-graph.h"
#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

namespace {

constexpr int64_t SPAN  = 2048;  // logits that are looked at together: they stay in the nearest cache
constexpr int64_t BLOCK = 64;    // logits of a span that are passed over at once where none is good enough
constexpr int64_t AHEAD = 512;   // logits that are fetched ahead of them
constexpr int64_t LANES = 16;    // of sums and maxima, so that the order of operations leaves room for vectors

// Loops over lanes are not to be unrolled: GCC does so first at -O3, finds no vectors then, and takes ten times as long.

struct candidate {
    float   logit;
    int32_t id;
};

// exp(x) for -87 <= x <= 0 in operations that compilers turn into vectors; relative error below 3e-7.
inline float exp_of_negative(float x) {
    const float n = (x*1.44269504f + 12582912.0f) - 12582912.0f;  // rounded: a float so large has no fraction
    const float r = (x - n*0.693359375f) + n*2.12194440e-4f;      // ln 2 in two parts, the first of few bits
    const float e = 1.0f + r*(1.0f + r*(0.5f + r*(1.0f/6 + r*(1.0f/24 + r*(1.0f/120 + r*(1.0f/720))))));
    const int32_t bits = ((int32_t) n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof(power));
    return e*power;
}

// The largest of n logits.
float largest(const float * logits, int64_t n) {
    float most[LANES];
    std::fill(most, most + LANES, -INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma GCC unroll 1
        for (int64_t j = 0; j < LANES; ++j) {
            const float x = logits[i + j];
            most[j] = x > most[j] ? x : most[j];
        }
    }
    for (; i < n; ++i) {
        most[0] = std::max(most[0], logits[i]);
    }
    return *std::max_element(most, most + LANES);
}

// Whether all logits of a block are numbers, and x at most. They come from memory, or a distant cache: fetching ahead took a
// quarter off the time of a row of 248,320.
inline bool within(const float * logits, float x) {
    __builtin_prefetch(logits + AHEAD);
    __builtin_prefetch(logits + AHEAD + BLOCK/2);
    int32_t count = 0;
    for (int64_t i = 0; i < BLOCK; ++i) {
        count += logits[i] <= x;
    }
    return count == BLOCK;
}

// The sum of exp(logit - most) of at most a span. What is further down than e^-87 counts as that: nothing beside the largest.
double mass(const float * logits, int64_t n, float most) {
    float term[SPAN];
    for (int64_t i = 0; i < n; ++i) {  // apart from the next loop, where it would become a branch
        const float x = logits[i] - most;
        term[i] = x > -87.0f ? x : -87.0f;
    }
    for (int64_t i = 0; i < n; ++i) {
        term[i] = exp_of_negative(term[i]);
    }
    std::fill(term + n, term + SPAN, 0.0f);
    float sum[LANES] = {};
    for (int64_t i = 0; i < SPAN; i += LANES) {
#pragma GCC unroll 1
        for (int64_t j = 0; j < LANES; ++j) {
            sum[j] += term[i + j];
        }
    }
    return std::accumulate(sum, sum + LANES, 0.0);
}

// The k best of a row, best first, equal ones by id; and the logarithm of the sum of all exp(logit) if that is asked for.
// Tokens in `apart`, which is sorted, are left out.
class ranking {
public:
    ranking(int32_t k, bool normalise, const std::vector<llama_token> & apart = {})
        : k(k), normalise(normalise), apart(apart) {}

    std::vector<llama_token_data> taken;  // by id: all that were among the k best of themselves and what is in front of them

    // False if a logit is no number, or infinite, or none is possible.
    bool read(const float * logits, int64_t n) {
        best.clear();
        taken.clear();
        most  = -INFINITY;
        total = 0.0;
        for (int64_t i = 0; i < n; i += SPAN) {
            const int64_t m = std::min(SPAN, n - i);
            if (!take(logits + i, i, m)) {
                return false;
            }
            if (normalise) {
                add(logits + i, m);
            }
        }
        return !best.empty() && best[0].logit > -INFINITY;
    }

    void write(int32_t * id, float * logp) const {
        for (int32_t i = 0; i < k; ++i) {
            id[i] = best[i].id;
            if (normalise) {
                logp[i] = (best[i].logit - (double) most) - std::log(total);
            }
        }
    }

private:
    bool full() const { return (int32_t) best.size() == k; }

    // False if a logit is no number or infinite.
    bool take(const float * logits, int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; i += BLOCK) {
            if (full() && i + BLOCK <= n && within(logits + i, best.back().logit)) {
                continue;
            }
            for (int64_t j = i; j < std::min(n, i + BLOCK); ++j) {
                if (!full() || !(logits[j] <= best.back().logit)) {
                    if (!(logits[j] < INFINITY)) {
                        return false;
                    }
                    take(logits[j], (llama_token) (first + j));
                }
            }
        }
        return true;
    }

    void add(const float * logits, int64_t n) {
        const float x = largest(logits, n);
        if (x > most) {
            total *= std::exp((double) most - x);
            most   = x;
        }
        if (most > -INFINITY) {
            total += mass(logits, n, most);
        }
    }

    void take(float logit, llama_token id) {
        if (std::binary_search(apart.begin(), apart.end(), id)) {
            return;
        }
        taken.push_back({ id, logit, 0.0f });
        if (full()) {
            best.pop_back();
        }
        // behind those that are as good: their ids are lower
        const auto at = std::upper_bound(best.begin(), best.end(), logit,
                                         [](float x, const candidate & c) { return x > c.logit; });
        best.insert(at, { logit, id });
    }

    const int32_t                  k;
    const bool                     normalise;
    const std::vector<llama_token> apart;
    std::vector<candidate>         best;
    float                          most  = -INFINITY;
    double                         total = 0.0;
};

}  // namespace

void kvf_find_top(llm_graph_result & res, ggml_backend_dev_t output) {
    auto * logits = res.t_logits;
    // of equal values other backends take any
    if (!logits || !kvf_is_cuda(output) || !ggml_is_contiguous(logits) || logits->type != GGML_TYPE_F32) {
        return;
    }
    auto * best  = ggml_argmax  (res.ctx_compute.get(), logits);
    auto * total = ggml_sum_rows(res.ctx_compute.get(), logits);
    if (ggml_backend_dev_supports_op(output, best) && ggml_backend_dev_supports_op(output, total)) {
        for (auto * found : { best, total }) {
            ggml_set_output(found);
            ggml_build_forward_expand(res.gf, found);
        }
        res.t_best  = best;
        res.t_total = total;
    }
}

bool kvf_leave_logits(llama_context & ctx, const llm_graph_result & res, bool whole) {
    return kvf_access::leave_logits(ctx, res, whole);
}

void kvf_fetch_logits(llama_context & ctx) {
    kvf_access::settle_logits(ctx, true);
}

void kvf_settle_logits(llama_context & ctx) {
    kvf_access::settle_logits(ctx, false);
}

bool kvf_access::leave_logits(llama_context & ctx, const llm_graph_result & res, bool whole) {
    // some drafters have a row for each token, wanted or not; and ggml may compute them elsewhere than was expected
    if (!whole || !res.t_best || res.t_logits->ne[1] != ctx.n_outputs ||
        !kvf_is_cuda(ggml_backend_get_device(ggml_backend_sched_get_tensor_backend(ctx.sched.get(), res.t_best)))) {
        return false;
    }
    ctx.kvf_newest = &res;
    ctx.kvf_left   = !std::exchange(ctx.kvf_wanted, false);
    return ctx.kvf_left;
}

void kvf_access::settle_logits(llama_context & ctx, bool wanted) {
    if (ctx.kvf_left) {
        auto * logits  = ctx.kvf_newest->t_logits;
        auto * backend = ggml_backend_sched_get_tensor_backend(ctx.sched.get(), logits);
        ggml_backend_tensor_get_async(backend, logits, ctx.logits.data, 0, ggml_nbytes(logits));
        ggml_backend_synchronize(backend);
    }
    ctx.kvf_left    = false;
    ctx.kvf_newest  = nullptr;
    ctx.kvf_wanted |= wanted;
}

// By the device. False if it was not asked, or if a row may have something that is no number: the host knows then.
bool kvf_access::find_top(llama_context & ctx, int32_t n, const int32_t * row, int32_t * id) {
    const auto * res = ctx.kvf_newest;
    if (!res) {
        return false;
    }
    ctx.synchronize();
    std::vector<int32_t> best(ctx.n_outputs);
    std::vector<float>   total(ctx.n_outputs);
    ggml_backend_tensor_get(res->t_best,  best.data(),  0, best.size()*sizeof(int32_t));
    ggml_backend_tensor_get(res->t_total, total.data(), 0, total.size()*sizeof(float));
    for (const auto & swap : ctx.output_swaps) {
        std::swap(best[swap.i0],  best[swap.i1]);
        std::swap(total[swap.i0], total[swap.i1]);
    }
    for (int32_t i = 0; i < n; ++i) {
        const auto j = ctx.output_resolve_row(row[i]);
        if (!std::isfinite(total[j])) {
            return false;
        }
        id[i] = best[j];
    }
    return true;
}

bool kvf_access::has_logits(const llama_context & ctx, int32_t row) {
    const int32_t kept = ctx.logits.data ? ctx.n_outputs : 0;
    if (row < 0) {
        return row >= -kept;
    }
    return row < (int32_t) ctx.output_ids.size() && ctx.output_ids[row] >= 0 && ctx.output_ids[row] < kept;
}

kvf_status kvf_logits_top(void * ctx_ptr, int32_t n, const int32_t * row, int32_t k, int32_t * id, float * logp) {
    auto &        ctx     = *(llama_context *) ctx_ptr;
    const int32_t n_vocab = ctx.get_model().vocab.n_tokens();
    if (k < 1 || k > n_vocab) {
        return kvf_fail(KVF_STATUS_ARGUMENT, "the %d best tokens of a vocabulary of %d", k, n_vocab);
    }
    for (int32_t i = 0; i < n; ++i) {
        if (!kvf_access::has_logits(ctx, row[i])) {
            return kvf_fail(KVF_STATUS_ARGUMENT, "row %d has no logits: the newest step has not kept them", row[i]);
        }
    }
    if (k == 1 && !logp && kvf_access::find_top(ctx, n, row, id)) {
        return KVF_STATUS_SUCCESS;
    }
    ranking best(k, logp != nullptr);
    for (int32_t i = 0; i < n; ++i) {
        if (!best.read(llama_get_logits_ith(&ctx, row[i]), n_vocab)) {
            return kvf_fail(KVF_STATUS_DECODE, "the logits of row %d are not finite", row[i]);
        }
        best.write(id + (int64_t) i*k, logp ? logp + (int64_t) i*k : nullptr);
    }
    return KVF_STATUS_SUCCESS;
}

bool kvf_candidates(const float * logits, int32_t n, int32_t k, std::vector<llama_token> & changed,
                    std::vector<llama_token_data> & out) {
    if (k < 1 || k > n) {
        return false;
    }
    std::sort(changed.begin(), changed.end());
    ranking best(k, false, changed);
    if (!best.read(logits, n)) {
        return false;
    }
    out.swap(best.taken);
    for (const auto id : changed) {
        if (0 <= id && id < n) {
            out.push_back({ id, logits[id], 0.0f });
        }
    }
    std::sort(out.begin(), out.end(), [](const auto & a, const auto & b) { return a.id < b.id; });
    return true;
}
