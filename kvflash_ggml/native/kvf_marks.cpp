// The text is read backwards, so that each place knows the longest mark that starts there. A queue then takes the places in
// the order of their marks. A place whose mark does not fit any more tries the next shorter mark that starts there.
#include "kvf_marks.h"

#include <algorithm>
#include <cctype>
#include <functional>
#include <queue>
#include <utility>

namespace {

uint64_t edge(uint32_t node, unsigned char byte) {
    return (uint64_t) node << 8 | byte;
}

}  // namespace

kvf_marks::kvf_marks(std::vector<kvf_mark> list) : marks(std::move(list)), roots(256, 0), shorter(marks.size(), NONE) {
    std::vector<uint32_t> at(marks.size(), 0);
    const size_t          depths = marks.empty() ? 0 : marks.front().text.size();
    for (size_t depth = 1; depth <= depths; ++depth) {
        for (uint32_t i = 0; i < marks.size() && marks[i].text.size() >= depth; ++i) {
            const auto & text = marks[i].text;
            const auto   byte = (unsigned char) text[text.size() - depth];
            const auto   [found, added] = edges.try_emplace(edge(at[i], byte), (uint32_t) fails.size());
            if (added) {
                const auto fail = at[i] == 0 ? 0 : step(fails[at[i]], byte);
                fails.push_back(fail);
                longest.push_back(longest[fail]);
                if (at[i] == 0) {
                    roots[byte] = found->second;
                }
            }
            at[i] = found->second;
            auto & mark = longest[at[i]];
            // of marks with one text the first takes all places
            if (text.size() == depth && (mark == NONE || marks[mark].text.size() < depth)) {
                shorter[i] = mark;
                mark       = i;
            }
        }
    }
}

uint32_t kvf_marks::step(uint32_t node, unsigned char byte) const {
    for (; node != 0; node = fails[node]) {
        if (const auto found = edges.find(edge(node, byte)); found != edges.end()) {
            return found->second;
        }
    }
    return roots[byte];
}

std::vector<kvf_piece> kvf_marks::split(const std::string & text) const {
    std::vector<uint64_t> starts;  // mark << 32 | offset
    uint32_t              node = 0;
    for (size_t i = marks.empty() ? 0 : text.size(); i-- > 0;) {
        node = step(node, (unsigned char) text[i]);
        if (longest[node] != NONE) {
            starts.push_back((uint64_t) longest[node] << 32 | i);
        }
    }

    struct place {
        size_t   begin, end;  // with the spaces that the mark takes
        uint32_t mark;
    };
    std::vector<place> places;
    std::vector<bool>  taken(starts.empty() ? 0 : text.size());
    const auto         free_space = [&](size_t i) { return !taken[i] && isspace((unsigned char) text[i]); };
    std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<uint64_t>> queue({}, std::move(starts));
    while (!queue.empty()) {
        const auto   mark   = (uint32_t) (queue.top() >> 32);
        const auto   offset = (size_t) (uint32_t) queue.top();
        const auto & one    = marks[mark];
        const auto   after  = offset + one.text.size();
        queue.pop();
        if (taken[offset]) {
            continue;
        }
        // what is taken is never shorter than this mark: it cannot lie between its ends
        if (taken[after - 1]) {
            if (shorter[mark] != NONE) {
                queue.push((uint64_t) shorter[mark] << 32 | offset);
            }
            continue;
        }
        place found{ offset, after, mark };
        while (one.left && found.begin > 0 && free_space(found.begin - 1)) {
            --found.begin;
        }
        while (one.right && found.end < text.size() && free_space(found.end)) {
            ++found.end;
        }
        std::fill(taken.begin() + found.begin, taken.begin() + found.end, true);
        places.push_back(found);
    }

    std::sort(places.begin(), places.end(), [](const place & a, const place & b) { return a.begin < b.begin; });
    std::vector<kvf_piece> pieces;
    size_t                 from = 0;
    for (const auto & one : places) {
        if (from < one.begin) {
            pieces.push_back({ -1, from, one.begin - from });
        }
        pieces.push_back({ marks[one.mark].token, one.begin, one.end - one.begin });
        from = one.end;
    }
    if (from < text.size()) {
        pieces.push_back({ -1, from, text.size() - from });
    }
    return pieces;
}
