// Goes on with a prompt as llama.cpp's own speculative decoding does, greedily, and then without a drafter.
// Usage: upstream_draft TARGET DRAFTER|- TYPE TOKENS PROMPT; "-" for a head in the target's own file.
// One line on stdout: tokens drafted, those accepted, steps of the target, and whether both answers are the same.
#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

struct counts {
    int drafted = 0, accepted = 0, steps = 0;
};

[[noreturn]] static void fail(const char * what) {
    fprintf(stderr, "upstream_draft: %s\n", what);
    exit(1);
}

static void decode(llama_context * ctx, common_batch & batch) {
    if (llama_process(ctx, LLAMA_PROCESS_TYPE_DECODE, batch.get())) {
        fail("the target cannot be computed");
    }
}

static llama_token likeliest(llama_context * ctx, int row) {
    const float * logits = llama_get_logits_ith(ctx, row);
    const int count = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(ctx)));
    return std::max_element(logits, logits + count) - logits;
}

// The prompt's continuation of at least `wanted` tokens; without `spec` a token a step.
static llama_tokens go_on(
        llama_context * ctx, common_speculative * spec, llama_context * drafts, const llama_tokens & prompt, size_t wanted,
        counts & found) {
    llama_memory_clear(llama_get_memory(ctx), true);
    llama_tokens text = prompt;
    common_batch batch(ctx);
    for (size_t i = 0; i < text.size(); ++i) {
        batch.add(text[i], i, 0, true);
    }
    decode(ctx, batch);
    if (!common_speculative_process(spec, batch)) {
        fail("the drafter cannot read the prompt");
    }
    common_speculative_begin(spec, 0, prompt);
    text.push_back(likeliest(ctx, text.size() - 1));
    while (text.size() < prompt.size() + wanted) {
        const int root = text.size() - 1;
        const llama_tokens before(text.begin(), text.end() - 1);
        llama_tokens draft;
        if (spec) {
            auto & asked = common_speculative_get_draft_params(spec, 0);
            asked = { true, -1, root, text.back(), &before, &draft };
            common_speculative_draft(spec);
            llama_memory_seq_rm(llama_get_memory(drafts), 0, root, -1);
        }
        batch.clear();
        batch.add(text.back(), root, 0, true);
        for (size_t i = 0; i < draft.size(); ++i) {
            batch.add(draft[i], root + 1 + i, 0, true);
        }
        decode(ctx, batch);
        if (!common_speculative_process(spec, batch)) {
            fail("the drafter cannot read on");
        }
        size_t same = 0;
        while (text.push_back(likeliest(ctx, same)), same < draft.size() && draft[same] == text.back()) {
            ++same;
        }
        if (spec) {
            common_speculative_accept(spec, 0, same);
            llama_memory_seq_rm(llama_get_memory(drafts), 0, root + 1 + same, -1);
        }
        if (!llama_memory_seq_rm(llama_get_memory(ctx), 0, root + 1 + same, -1)) {
            fail("the target cannot go back");
        }
        found.drafted += draft.size();
        found.accepted += same;
        found.steps++;
    }
    text.resize(prompt.size() + wanted);
    return { text.begin() + prompt.size(), text.end() };
}

int main(int argc, char ** argv) {
    if (argc != 6) {
        fail("TARGET DRAFTER|- TYPE TOKENS PROMPT");
    }
    common_params params;
    params.model.path = argv[1];
    params.n_ctx = params.n_batch = params.n_ubatch = 2048;
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1;
    params.warmup = params.fit_params = false;
    auto & drafter = params.speculative;
    drafter.types = common_speculative_types_from_names({ argv[3] });
    drafter.draft.n_max = 8;
    if (std::string(argv[2]) != "-") {
        drafter.draft.mparams.path = argv[2];
    }
    params.n_outputs_max_per_seq = 0;
    auto target = common_init_from_params(params);
    if (!target->context()) {
        fail("the target cannot be loaded");
    }
    common_params own = common_base_params_to_speculative(params);
    auto drafts = common_speculative_init_from_params(own, target->model(), target->context());
    if (!drafts->context()) {
        fail("the drafter cannot be loaded");
    }
    drafter.draft.ctx_tgt = target->context();
    drafter.draft.ctx_dft = drafts->context();
    common_speculative_ptr spec(common_speculative_init(drafter, 1));
    if (!spec) {
        fail("no drafter of this type");
    }
    const llama_tokens prompt = common_tokenize(target->context(), argv[5], true);
    const size_t wanted = std::stoul(argv[4]);
    counts with, without;
    const auto guessed = go_on(target->context(), spec.get(), drafts->context(), prompt, wanted, with);
    spec.reset();
    const auto plain = go_on(target->context(), nullptr, nullptr, prompt, wanted, without);
    printf("%d %d %d %s\n", with.drafted, with.accepted, with.steps, guessed == plain ? "same" : "differs");
}
