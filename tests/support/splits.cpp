// Splits texts as llama.cpp's BPE tokenizers do before they merge, by each list of expressions that its source knows.
// Compiled twice: with unicode.cpp as it comes, and with ours behind it (OURS). pre_tokenizers.h is `llm_tokenizer_bpe`,
// cut from llama-vocab.cpp. Each line on stdin is a text in hex. It is answered by a line for each list, with the bytes of
// the words, and "end". With lengths as arguments a line on stdin has two texts, and is answered by the steps that our
// matcher takes for the first one, repeated up to each length, with the second one behind it.
#include "llama-vocab.h"
#include "unicode.h"

#ifdef OURS
#include "kvf_regex.h"
#endif

#include <cstdio>
#include <iostream>
#include <set>
#include <string>
#include <vector>

// As much of a vocabulary as the constructor asks for.
struct one_vocab {
    llama_vocab_pre_type  pre;
    enum llama_vocab_type get_type() const { return LLAMA_VOCAB_TYPE_BPE; }
    llama_vocab_pre_type  get_pre_type() const { return pre; }
};

struct llm_tokenizer {};

#define GGML_ASSERT(x)
#define llama_vocab one_vocab
#include "pre_tokenizers.h"
#undef llama_vocab

static std::string from_hex(const std::string & hex) {
    std::string res;
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
        res.push_back((char) std::stoi(hex.substr(i, 2), nullptr, 16));
    }
    return res;
}

int main(int argc, char ** argv) {
    std::set<std::vector<std::string>> lists;
    for (int pre = 0; pre < N_PRE_TYPES; ++pre) {
        lists.insert(llm_tokenizer_bpe(one_vocab{ (llama_vocab_pre_type) pre }).regex_exprs);
    }
    std::string line;
    while (std::getline(std::cin, line)) {
        const auto space = line.find(' ');
        const auto text  = from_hex(line.substr(0, space));
        for (const auto & list : lists) {
#ifdef OURS
            for (int i = 1; i < argc; ++i) {
                std::string run;
                while (run.size() < std::stoul(argv[i])) {
                    run += text;
                }
                const auto before = kvf_regex_steps();
                unicode_regex_split(run + from_hex(line.substr(space + 1)), list, false);
                printf("%zu ", kvf_regex_steps() - before);
            }
#endif
            if (argc == 1) {
                for (const auto & word : unicode_regex_split(text, list, false)) {
                    printf("%zu ", word.size());
                }
            }
            printf("\n");
        }
        printf("end\n");
        fflush(stdout);
    }
    return 0;
}
