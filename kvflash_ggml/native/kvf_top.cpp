// The likeliest tokens of rows of logits: what a sampler that takes the best one, and a drafter, need of a vocabulary.
#include "kvf_error.h"
#include "kvf_pool.h"

#include "llama-model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

namespace {

constexpr int64_t SPAN  = 2048;  // logits that are looked at together: they stay in the nearest cache
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

// The largest of n logits, or NaN if there is one among them.
float largest(const float * logits, int64_t n) {
    float   most[LANES];
    int32_t nan[LANES] = {};
    std::fill(most, most + LANES, -INFINITY);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
#pragma GCC unroll 1
        for (int64_t j = 0; j < LANES; ++j) {
            const float x = logits[i + j];
            most[j] = x > most[j] ? x : most[j];
            nan[j] |= x != x;
        }
    }
    for (; i < n; ++i) {
        most[0] = std::max(most[0], logits[i]);
        nan[0] |= logits[i] != logits[i];
    }
    return *std::max_element(nan, nan + LANES) ? NAN : *std::max_element(most, most + LANES);
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
class ranking {
public:
    ranking(int32_t k, bool normalise) : k(k), normalise(normalise) {}

    // False if a logit is no number, or infinite, or none is possible.
    bool read(const float * logits, int64_t n) {
        best.clear();
        most  = -INFINITY;
        total = 0.0;
        for (int64_t i = 0; i < n; i += SPAN) {
            const int64_t m = std::min(SPAN, n - i);
            const float   x = largest(logits + i, m);
            if (!(x < INFINITY)) {
                return false;
            }
            if (wants(x)) {
                take(logits + i, i, m);
            }
            if (normalise && x > -INFINITY) {
                if (x > most) {
                    total *= std::exp((double) most - x);
                    most   = x;
                }
                total += mass(logits + i, m, most);
            }
        }
        return best[0].logit > -INFINITY;
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
    bool wants(float logit) const { return (int32_t) best.size() < k || logit > best.back().logit; }

    void take(const float * logits, int64_t first, int64_t n) {
        for (int64_t i = 0; i < n; ++i) {
            if (!wants(logits[i])) {
                continue;
            }
            if ((int32_t) best.size() == k) {
                best.pop_back();
            }
            // behind those that are as good: their ids are lower
            const auto at = std::upper_bound(best.begin(), best.end(), logits[i],
                                             [](float x, const candidate & c) { return x > c.logit; });
            best.insert(at, { logits[i], (int32_t) (first + i) });
        }
    }

    const int32_t          k;
    const bool             normalise;
    std::vector<candidate> best;
    float                  most  = -INFINITY;
    double                 total = 0.0;
};

}  // namespace

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
    ranking best(k, logp != nullptr);
    for (int32_t i = 0; i < n; ++i) {
        if (!best.read(llama_get_logits_ith(&ctx, row[i]), n_vocab)) {
            return kvf_fail(KVF_STATUS_DECODE, "the logits of row %d are not finite", row[i]);
        }
        best.write(id + (int64_t) i*k, logp ? logp + (int64_t) i*k : nullptr);
    }
    return KVF_STATUS_SUCCESS;
}
