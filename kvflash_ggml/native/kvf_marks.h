// Finds the special tokens of a text, as llama_vocab::impl::tokenizer_st_partition does, in one pass over the text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

// A special token. left and right: it takes the spaces in front of it and behind it.
struct kvf_mark {
    int32_t     token;
    std::string text;
    bool        left;
    bool        right;
};

// A special token, or (token < 0) a range of bytes of the text between special tokens.
struct kvf_piece {
    int32_t token;
    size_t  offset;
    size_t  length;
};

class kvf_marks {
public:
    kvf_marks() = default;

    // list: in the order in which the marks are tried, which must be longest first. No text is empty.
    explicit kvf_marks(std::vector<kvf_mark> list);

    // Returns the pieces of a text of less than 4 GiB. The first mark takes its places from left to right, then the second
    // takes its places in what is left, and so on.
    std::vector<kvf_piece> split(const std::string & text) const;

private:
    uint32_t step(uint32_t node, unsigned char byte) const;

    // The marks, read backwards, are an Aho-Corasick automaton. A node is a tail of marks, and 0 the empty one.
    std::vector<kvf_mark>                  marks;
    std::unordered_map<uint64_t, uint32_t> edges;             // from a node << 8 | byte
    std::vector<uint32_t>                  roots;             // the edges of node 0: most bytes end no mark
    std::vector<uint32_t>                  fails{ 0 };        // the longest other node with which the tail begins
    std::vector<uint32_t>                  longest{ NONE };   // mark with which the tail begins
    std::vector<uint32_t>                  shorter;           // by mark: the longest other mark with which it begins

    static constexpr uint32_t NONE = UINT32_MAX;
};
