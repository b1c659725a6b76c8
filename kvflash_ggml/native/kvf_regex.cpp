// A backtracking matcher whose stack is on the heap. It finds what std::regex finds: of the leftmost matches the one that the
// first alternatives and the longest repetitions lead to. It never tries the same choice at the same place twice.
#include "kvf_regex.h"

#include <algorithm>
#include <bitset>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <utility>

namespace {

constexpr uint32_t NO_LIMIT = UINT32_MAX;
constexpr size_t   NOWHERE  = SIZE_MAX;

using range_list = std::vector<std::pair<uint32_t, uint32_t>>;  // first and last, both included

// A class of characters. Those below 256 are looked up: a collapsed text has no others.
struct char_set {
    std::bitset<256> low;
    range_list       ranges;
    bool             negated = false;

    bool in_ranges(uint32_t c) const {
        return negated != std::any_of(ranges.begin(), ranges.end(), [c](auto & r) { return r.first <= c && c <= r.second; });
    }

    bool has(uint32_t c) const {
        return c < low.size() ? low[c] : in_ranges(c);
    }
};

struct node {
    enum kind_t { SET, SEQUENCE, EITHER, REPEAT, AHEAD, END } kind;
    std::vector<std::unique_ptr<node>> parts;
    uint32_t set     = 0;
    uint32_t least   = 0;      // repetitions
    uint32_t most    = 0;
    bool     negated = false;  // of AHEAD
};

using node_ptr = std::unique_ptr<node>;

node_ptr make(node::kind_t kind) {
    auto res = std::make_unique<node>();
    res->kind = kind;
    return res;
}

bool can_be_empty(const node & n) {
    auto empty = [](const node_ptr & part) { return can_be_empty(*part); };
    switch (n.kind) {
        case node::SET:      return false;
        case node::SEQUENCE: return std::all_of(n.parts.begin(), n.parts.end(), empty);
        case node::EITHER:   return std::any_of(n.parts.begin(), n.parts.end(), empty);
        case node::REPEAT:   return n.least == 0 || empty(n.parts[0]);
        default:             return true;
    }
}

struct instruction {
    enum op_t : uint32_t {
        TAKE,    // a character of set a
        CHOOSE,  // goes on with the next instruction, and where that fails at a; b counts the choices
        JUMP,    // to a
        AHEAD,   // up to a is what must match here, or with b must not; goes on at a
        AT_END,
        MATCHED,
    } op;
    uint32_t a;
    uint32_t b;
};

struct program {
    std::vector<char_set>    sets;
    std::vector<instruction> code;
    uint32_t                 n_choices = 0;
};

// Reads an expression into a tree, and writes the tree as a program. Recursion is as deep as the expression's groups.
class compiler {
  public:
    explicit compiler(std::vector<uint32_t> regex) : regex(std::move(regex)) {}

    program compile() {
        const auto tree = either();
        if (pos < regex.size()) {
            fail("a group is closed that was not opened");
        }
        write(*tree);
        add(instruction::MATCHED);
        return std::move(prog);
    }

  private:
    [[noreturn]] void fail(const std::string & what) const {
        throw std::invalid_argument(what + ", before place " + std::to_string(pos) + " of the expression");
    }

    bool next_is(char c) const {
        return pos < regex.size() && regex[pos] == (uint32_t) c;
    }

    bool accept(const char * text) {
        const std::string wanted = text;
        if (regex.size() - pos < wanted.size() || !std::equal(wanted.begin(), wanted.end(), regex.begin() + pos)) {
            return false;
        }
        pos += wanted.size();
        return true;
    }

    uint32_t take() {
        if (pos == regex.size()) {
            fail("the expression is not complete");
        }
        return regex[pos++];
    }

    node_ptr either() {
        auto res = make(node::EITHER);
        do {
            auto sequence = make(node::SEQUENCE);
            while (pos < regex.size() && !next_is('|') && !next_is(')')) {
                sequence->parts.push_back(repeated(atom()));
            }
            res->parts.push_back(std::move(sequence));
        } while (accept("|"));
        return res;
    }

    node_ptr atom() {
        if (accept("$")) {
            return make(node::END);
        }
        const bool is_not = accept("(?!");
        if (is_not || accept("(?=")) {
            auto res = make(node::AHEAD);
            res->negated = is_not;
            res->parts.push_back(group());
            if (can_be_empty(*res->parts[0])) {
                fail("what follows may be empty");
            }
            return res;
        }
        if (accept("(?:") || accept("(")) {
            return group();
        }
        char_set set;
        if (accept("[")) {
            bracket(set);
        } else if (const auto c = take(); c == '\\') {
            escaped(set.ranges);
        } else if (c < 128 && std::string("^.*+?{}[]").find((char) c) != std::string::npos) {
            fail("this use of a special character is unknown");
        } else {
            set.ranges.emplace_back(c, c);
        }
        for (uint32_t c = 0; c < set.low.size(); ++c) {
            set.low[c] = set.in_ranges(c);
        }
        auto res = make(node::SET);
        res->set = prog.sets.size();
        prog.sets.push_back(std::move(set));
        return res;
    }

    node_ptr group() {
        auto res = either();
        if (!accept(")")) {
            fail("a group is not closed");
        }
        return res;
    }

    node_ptr repeated(node_ptr one) {
        auto res = make(node::REPEAT);
        if (accept("*")) {
            res->most = NO_LIMIT;
        } else if (accept("+")) {
            res->least = 1;
            res->most = NO_LIMIT;
        } else if (accept("?")) {
            res->most = 1;
        } else if (accept("{")) {
            res->least = res->most = number();
            if (accept(",")) {
                res->most = next_is('}') ? NO_LIMIT : number();
            }
            if (!accept("}") || res->most < res->least) {
                fail("a number of repetitions is wrong");
            }
        } else {
            return one;
        }
        if (next_is('?') || next_is('*') || next_is('+') || next_is('{')) {
            fail("this kind of repetition is unknown");
        }
        if (res->most == NO_LIMIT && can_be_empty(*one)) {
            fail("what is repeated may be empty");
        }
        res->parts.push_back(std::move(one));
        return res;
    }

    uint32_t number() {
        uint32_t res = 0;
        for (uint32_t c = take(); ; c = take()) {
            if (c < '0' || c > '9' || res > 999) {
                fail("a number of repetitions is wrong");
            }
            res = 10*res + (c - '0');
            if (next_is('}') || next_is(',')) {
                return res;
            }
        }
    }

    // After a backslash. Returns the character that it stands for, or -1 for a class, whose ranges are added.
    int64_t escaped(range_list & ranges) {
        const auto c = take();
        static const range_list space = {{ '\t', '\r' }, { ' ', ' ' }}, digit = {{ '0', '9' }},
                                word = {{ '0', '9' }, { 'A', 'Z' }, { '_', '_' }, { 'a', 'z' }};
        switch (c) {
            case 's': case 'd': case 'w': {
                const auto & found = c == 's' ? space : c == 'd' ? digit : word;
                ranges.insert(ranges.end(), found.begin(), found.end());
                return -1;
            }
            case 'S': case 'D': case 'W': {
                uint32_t first = 0;
                for (const auto & r : c == 'S' ? space : c == 'D' ? digit : word) {
                    ranges.emplace_back(first, r.first - 1);
                    first = r.second + 1;
                }
                ranges.emplace_back(first, UINT32_MAX);
                return -1;
            }
            case 'n': case 'r': case 't': {
                const uint32_t letter = c == 'n' ? '\n' : c == 'r' ? '\r' : '\t';
                ranges.emplace_back(letter, letter);
                return letter;
            }
        }
        if (c >= 128 || (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || c == '_') {
            fail("this escape is unknown");
        }
        ranges.emplace_back(c, c);
        return c;
    }

    void bracket(char_set & set) {
        set.negated = accept("^");
        while (!accept("]")) {
            if (next_is('-') || accept("[:") || accept("[.") || accept("[=")) {
                fail("this use of - or [ in a class is unknown");
            }
            const auto c = one_of(set.ranges);
            if (accept("-")) {
                const auto last = next_is(']') ? -1 : one_of(set.ranges);
                if (c < 0 || last < c) {
                    fail("a range of characters is wrong");
                }
                set.ranges.emplace_back(c, last);
            }
        }
    }

    int64_t one_of(range_list & ranges) {
        const auto c = take();
        if (c == '\\') {
            return escaped(ranges);
        }
        ranges.emplace_back(c, c);
        return c;
    }

    uint32_t add(instruction::op_t op, uint32_t a = 0, uint32_t b = 0) {
        prog.code.push_back({ op, a, b });
        return prog.code.size() - 1;
    }

    uint32_t choose() {
        return add(instruction::CHOOSE, 0, prog.n_choices++);
    }

    void write(const node & n) {
        const auto here = [this] { return (uint32_t) prog.code.size(); };
        std::vector<uint32_t> ends;  // instructions that go on behind the node
        switch (n.kind) {
            case node::SET:
                add(instruction::TAKE, n.set);
                break;
            case node::SEQUENCE:
                for (const auto & part : n.parts) {
                    write(*part);
                }
                break;
            case node::EITHER:
                for (size_t i = 0; i + 1 < n.parts.size(); ++i) {
                    const auto other = choose();
                    write(*n.parts[i]);
                    ends.push_back(add(instruction::JUMP));
                    prog.code[other].a = here();
                }
                write(*n.parts.back());
                break;
            case node::REPEAT:
                for (uint32_t i = 0; i < n.least; ++i) {
                    write(*n.parts[0]);
                }
                if (n.most == NO_LIMIT) {
                    ends.push_back(choose());
                    write(*n.parts[0]);
                    add(instruction::JUMP, ends[0]);
                    break;
                }
                for (uint32_t i = n.least; i < n.most; ++i) {
                    ends.push_back(choose());
                    write(*n.parts[0]);
                }
                break;
            case node::AHEAD:
                ends.push_back(add(instruction::AHEAD, 0, n.negated));
                write(*n.parts[0]);
                add(instruction::MATCHED);
                break;
            case node::END:
                add(instruction::AT_END);
                break;
        }
        for (const auto i : ends) {
            prog.code[i].a = here();
        }
    }

    const std::vector<uint32_t> regex;
    size_t                      pos = 0;
    program                     prog;
};

template <typename CharT>
uint32_t code_of(CharT c) {
    return static_cast<std::make_unsigned_t<CharT>>(c);
}

thread_local size_t n_steps = 0;

// Matches one piece of a text. What follows a choice at a place does not depend on where the match began: a choice that has
// failed there, fails there again.
template <typename CharT>
class matcher {
  public:
    explicit matcher(const program & prog) : prog(prog), choice_ahead(has_choice_ahead()) {}

    void split(const CharT * piece, size_t length, std::vector<size_t> & res) {
        text = piece;
        size = length;
        tried.assign(prog.n_choices*(size + 1), false);
        found.assign(choice_ahead ? tried.size() : 0, false);
        size_t done   = 0;  // the end of the last match
        size_t begin  = 0;
        size_t not_at = NOWHERE;
        while (begin <= size) {
            const auto end = match(begin, not_at);
            if (end == NOWHERE) {
                ++begin;
                not_at = NOWHERE;
                continue;
            }
            if (begin > done) {
                res.push_back(begin - done);
            }
            res.push_back(end - begin);
            if (end == begin && end == size) {
                break;
            }
            not_at = end == begin ? end : NOWHERE;  // behind an empty match, a longer one may begin at its place
            done = begin = end;
        }
        if (done < size) {
            res.push_back(size - done);
        }
    }

  private:
    // A choice on the way to the current place.
    struct step {
        uint32_t pos;  // llama_tokenize takes less than 2 GiB
        uint32_t at;
        bool     second;
    };

    // The end of the match that begins at a place, or NOWHERE. not_at: a match must not end there.
    size_t match(size_t begin, size_t not_at = NOWHERE) {
        const auto end = run(0, begin, not_at);
        if (end != NOWHERE) {
            // choices that led here have not failed at the end, where the next match begins
            for (auto it = path.rbegin(); it != path.rend() && it->pos == end; ++it) {
                tried[bit(*it)] = false;
            }
            path.clear();
        }
        return end;
    }

    size_t bit(const step & s) const {
        return prog.code[s.at].b*(size + 1) + s.pos;
    }

    bool has_choice_ahead() const {
        for (size_t i = 0; i < prog.code.size(); ++i) {
            if (prog.code[i].op == instruction::AHEAD) {
                for (size_t k = i + 1; k < prog.code[i].a; ++k) {
                    if (prog.code[k].op == instruction::CHOOSE) {
                        return true;
                    }
                }
            }
        }
        return false;
    }

    // Does what must be ahead match? Choices that led there are remembered: they do it again.
    bool is_ahead(uint32_t at, size_t pos) {
        const auto first = path.size();
        const bool res = run(at, pos, NOWHERE) != NOWHERE;
        for (size_t i = first; i < path.size(); ++i) {
            found[bit(path[i])] = true;
        }
        path.resize(first);
        return res;
    }

    size_t run(uint32_t at, size_t pos, size_t not_at) {
        const auto first = path.size();
        while (true) {
            ++n_steps;
            const auto & i = prog.code[at];
            bool good = true;
            switch (i.op) {
                case instruction::TAKE:
                    good = pos < size && prog.sets[i.a].has(code_of(text[pos]));
                    ++pos;
                    ++at;
                    break;
                case instruction::CHOOSE: {
                    const step s = { (uint32_t) pos, at, false };
                    if (tried[bit(s)]) {
                        if (!found.empty() && found[bit(s)]) {
                            return pos;
                        }
                        good = false;
                        break;
                    }
                    tried[bit(s)] = true;
                    path.push_back(s);
                    ++at;
                    break;
                }
                case instruction::JUMP:
                    at = i.a;
                    break;
                case instruction::AHEAD:
                    good = is_ahead(at + 1, pos) != (bool) i.b;
                    at = i.a;
                    break;
                case instruction::AT_END:
                    good = pos == size;
                    ++at;
                    break;
                case instruction::MATCHED:
                    if (pos != not_at) {
                        return pos;
                    }
                    good = false;
                    break;
            }
            if (good) {
                continue;
            }
            while (path.size() > first && path.back().second) {
                path.pop_back();
            }
            if (path.size() == first) {
                return NOWHERE;
            }
            path.back().second = true;
            at = prog.code[path.back().at].a;
            pos = path.back().pos;
        }
    }

    const program &   prog;
    const bool        choice_ahead;
    const CharT *     text = nullptr;
    size_t            size = 0;
    std::vector<bool> tried;  // by choice and place
    std::vector<bool> found;  // of those ahead, which led to a match
    std::vector<step> path;
};

template <typename CharT>
std::vector<size_t> split(
        const std::basic_string<CharT> & text, const std::basic_string<CharT> & regex, const std::vector<size_t> & offsets) {
    std::vector<uint32_t> codes(regex.size());
    std::transform(regex.begin(), regex.end(), codes.begin(), code_of<CharT>);
    const auto prog = compiler(std::move(codes)).compile();
    std::vector<size_t> res;
    res.reserve(offsets.size());
    matcher<CharT> m(prog);
    const CharT * piece = text.data();
    for (const auto size : offsets) {
        m.split(piece, size, res);
        piece += size;
    }
    return res;
}

}  // namespace

std::vector<size_t> kvf_regex_split(const std::string & text, const std::string & regex, const std::vector<size_t> & offsets) {
    return split(text, regex, offsets);
}

std::vector<size_t> kvf_regex_split(const std::wstring & text, const std::wstring & regex, const std::vector<size_t> & offsets) {
    return split(text, regex, offsets);
}

size_t kvf_regex_steps() {
    return n_steps;
}
