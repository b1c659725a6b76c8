// A grammar that waits for its trigger, and does not look for it while the model reasons.
#include "kvf.h"
#include "kvf_chat_guard.h"

#include "common.h"
#include "reasoning-budget.h"

#include <cctype>
#include <climits>
#include <vector>

namespace {

struct held {
    llama_sampler * grammar;
    llama_sampler * reasoning;  // NULL if the model does not reason, or the grammar does not wait
};

bool applies(const held & sampler) {
    if (!sampler.reasoning) {
        return true;
    }
    const auto state = common_reasoning_budget_get_state(sampler.reasoning);
    return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
}

held & of(llama_sampler * sampler) {
    return *static_cast<held *>(sampler->ctx);
}

const char * name(const llama_sampler *) {
    return "kvf-chat";
}

void apply(llama_sampler * sampler, llama_token_data_array * tokens) {
    if (applies(of(sampler))) {
        llama_sampler_apply(of(sampler).grammar, tokens);
    }
}

void accept(llama_sampler * sampler, llama_token token) {
    auto &     both    = of(sampler);
    const bool applied = applies(both);
    if (both.reasoning) {
        llama_sampler_accept(both.reasoning, token);
        // the mark at the end of the reasoning may be a trigger itself
        if (!applied && common_reasoning_budget_get_state(both.reasoning) == REASONING_BUDGET_DONE) {
            if (const auto * mark = common_reasoning_budget_get_end_match(both.reasoning)) {
                for (const auto part : *mark) {
                    llama_sampler_accept(both.grammar, part);
                }
            }
        }
    }
    if (applied) {
        llama_sampler_accept(both.grammar, token);
    }
}

void reset(llama_sampler * sampler) {
    llama_sampler_reset(of(sampler).grammar);
    if (of(sampler).reasoning) {
        llama_sampler_reset(of(sampler).reasoning);
    }
}

void forget(llama_sampler * sampler) {
    llama_sampler_free(of(sampler).grammar);
    if (of(sampler).reasoning) {
        llama_sampler_free(of(sampler).reasoning);
    }
    delete &of(sampler);
}

llama_sampler * made(held both);

llama_sampler * clone(const llama_sampler * sampler) {
    const auto & both = *static_cast<const held *>(sampler->ctx);
    return made({ llama_sampler_clone(both.grammar), both.reasoning ? llama_sampler_clone(both.reasoning) : nullptr });
}

llama_sampler_i kind() {
    llama_sampler_i functions = {};
    functions.name   = name;
    functions.accept = accept;
    functions.apply  = apply;
    functions.reset  = reset;
    functions.clone  = clone;
    functions.free   = forget;
    return functions;
}

llama_sampler * made(held both) {
    static llama_sampler_i functions = kind();
    return llama_sampler_init(&functions, new held(both));
}

std::vector<std::string> texts(const common_json & values) {
    std::vector<std::string> out;
    for (const auto & value : values) {
        out.push_back(value);
    }
    return out;
}

// The tokens of a text that stands at the end of a prompt.
llama_tokens tokens_of(const llama_vocab * vocab, const std::string & text) {
    auto tokens = common_tokenize(vocab, text, false, true);
    if (!tokens.empty()) {
        const auto first = common_token_to_piece(vocab, tokens[0], true);
        if (!first.empty() && isspace((unsigned char) first[0]) && !isspace((unsigned char) text[0])) {
            tokens.erase(tokens.begin());  // some tokenizers put a space before a special token
        }
    }
    return tokens;
}

llama_sampler * lazy(const llama_vocab * vocab, const std::string & grammar, const common_json & asked) {
    auto patterns = texts(asked.at("triggers"));
    llama_tokens tokens;
    for (const auto & word : texts(asked.at("words"))) {
        const auto found = common_tokenize(vocab, word, false, true);
        if (found.size() == 1) {
            tokens.push_back(found[0]);
        } else {
            patterns.push_back(regex_escape(word));
        }
    }
    std::vector<const char *> pointers;
    for (const auto & pattern : patterns) {
        pointers.push_back(pattern.c_str());
    }
    return llama_sampler_init_grammar_lazy_patterns(
        vocab, grammar.c_str(), "root", pointers.data(), pointers.size(), tokens.data(), tokens.size());
}

}  // namespace

void * kvf_chat_sampler(const void * model_vocab, const char * asked_text, size_t size) {
    const auto * vocab = static_cast<const llama_vocab *>(model_vocab);
    held both = {};
    const auto status = kvf_chat_guarded(KVF_CHAT_STATUS_ARGUMENT, [&] {
        const auto        asked    = kvf_chat_json(asked_text, size);
        const std::string grammar  = asked.at("grammar");
        const auto        begun    = tokens_of(vocab, asked.at("prefill"));
        const auto        thinking = texts(asked.at("thinking"));
        if (!asked.at("lazy").get<bool>()) {
            both.grammar = llama_sampler_init_grammar(vocab, grammar.c_str(), "root");
            for (size_t i = 0; both.grammar && i < begun.size(); i++) {
                llama_sampler_accept(both.grammar, begun[i]);
            }
            return;
        }
        both.grammar = lazy(vocab, grammar, asked);
        if (!both.grammar || thinking.empty()) {
            return;
        }
        std::vector<llama_tokens> ends;
        for (size_t i = 1; i < thinking.size(); i++) {
            ends.push_back(common_tokenize(vocab, thinking[i], false, true));
        }
        both.reasoning = common_reasoning_budget_init(
            vocab, { common_tokenize(vocab, thinking[0], false, true) }, ends, {}, INT_MAX);
        for (const auto token : begun) {
            llama_sampler_accept(both.reasoning, token);
        }
    });
    if (status == KVF_CHAT_STATUS_SUCCESS && both.grammar) {
        return made(both);
    }
    if (both.grammar) {
        llama_sampler_free(both.grammar);
    } else if (status == KVF_CHAT_STATUS_SUCCESS) {
        kvf_chat_fail(kvf_last_error());
    }
    return nullptr;
}
