// Divides texts at special tokens, as llama.cpp does and as kvf_marks.cpp does. partition.h is upstream's function, cut from
// llama-vocab.cpp. Each line on stdin has: 1 where control tokens are looked for or 0, the text in hex, and a word
// ATTRIBUTES:HEX for each token. It is answered by two lines: upstream's pieces and ours.
#include "kvf_marks.h"
#include "llama.h"

#include <algorithm>
#include <cassert>
#include <cctype>
#include <cstdio>
#include <forward_list>
#include <iostream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#define GGML_ASSERT(x) assert(x)

struct fragment_buffer_variant;

// As much of a vocabulary as the function asks for.
struct llama_vocab {
    struct token_data {
        std::string text;
        int         attr;
    };

    struct impl {
        const llama_vocab &      vocab;
        std::vector<llama_token> cache_special_tokens;
        void tokenizer_st_partition(std::forward_list<fragment_buffer_variant> & buffer, bool parse_special) const;
    };

    std::vector<token_data> data;
    const token_data & get_token_data(llama_token id) const { return data[id]; }
};

#include "partition.h"

static std::string from_hex(const std::string & hex) {
    std::string res;
    for (size_t i = 0; i + 1 < hex.size(); i += 2) {
        res.push_back((char) std::stoi(hex.substr(i, 2), nullptr, 16));
    }
    return res;
}

static void print(const std::vector<kvf_piece> & pieces) {
    for (const auto & one : pieces) {
        if (one.token < 0) {
            printf("%zu+%zu ", one.offset, one.length);
        } else {
            printf("<%d> ", one.token);
        }
    }
    printf("\n");
}

int main() {
    std::string line;
    while (std::getline(std::cin, line)) {
        std::istringstream words(line);
        bool parse_special;
        std::string text, word;
        words >> parse_special >> text;
        text = from_hex(text);

        llama_vocab       vocab;
        llama_vocab::impl impl{ vocab, {} };
        while (words >> word) {
            const auto colon = word.find(':');
            impl.cache_special_tokens.push_back((llama_token) vocab.data.size());
            vocab.data.push_back({ from_hex(word.substr(colon + 1)), std::stoi(word.substr(0, colon)) });
        }
        std::sort(impl.cache_special_tokens.begin(), impl.cache_special_tokens.end(), [&](llama_token a, llama_token b) {
            return vocab.data[a].text.size() > vocab.data[b].text.size();
        });

        std::forward_list<fragment_buffer_variant> buffer;
        buffer.emplace_front(text, 0, text.size());
        impl.tokenizer_st_partition(buffer, parse_special);
        std::vector<kvf_piece> pieces;
        for (const auto & one : buffer) {
            pieces.push_back({ one.token, one.offset, one.length });
        }
        print(pieces);

        std::vector<kvf_mark> marks;
        for (const auto id : impl.cache_special_tokens) {
            const auto & one = vocab.data[id];
            if (parse_special || !(one.attr & (LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_UNKNOWN))) {
                marks.push_back({ id, one.text, (one.attr & LLAMA_TOKEN_ATTR_LSTRIP) != 0, (one.attr & LLAMA_TOKEN_ATTR_RSTRIP) != 0 });
            }
        }
        print(kvf_marks(std::move(marks)).split(text));
        fflush(stdout);
    }
}
