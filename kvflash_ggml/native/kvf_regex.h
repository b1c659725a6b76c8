// Splits a text by a regular expression, as std::regex_iterator does, in time and memory linear in the text.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

// Returns the lengths of the matches and of what is between them, of each piece of the text. offsets: the lengths of the
// pieces, counted in characters, which together are the text. The expression is ECMAScript as std::basic_regex takes it in the
// classic locale: the part that llama-vocab.cpp uses. Throws std::invalid_argument for any other.
std::vector<size_t> kvf_regex_split(const std::string & text, const std::string & regex, const std::vector<size_t> & offsets);
std::vector<size_t> kvf_regex_split(const std::wstring & text, const std::wstring & regex, const std::vector<size_t> & offsets);

// Instructions that this thread has executed in kvf_regex_split: what a text costs, without a clock.
size_t kvf_regex_steps();
