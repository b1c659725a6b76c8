// The tokens that a chain of samplers can draw, where they are few.
#pragma once

#include "llama.h"

#include <vector>

// Fills out with the tokens of a row, in the order of their ids, that std::partial_sort needs in order to find the best k as it
// finds them among all n. Of equal logits too: a token has no effect unless it is one of the first k, or better than the worst
// of the best k in front of it. changed: tokens whose logits may become others before that, and which are all kept.
//
// False if k is not between 1 and n, or if the row is not finite: a token may be impossible (-INFINITY), not all of them.
bool kvf_candidates(const float * logits, int32_t n, int32_t k, std::vector<llama_token> & changed,
                    std::vector<llama_token_data> & out);
