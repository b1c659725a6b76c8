#include "kvf_chat.h"

#include "chat.h"
#include "chat-peg-parser.h"
#include "json-schema-to-grammar.h"
#include "jinja/lexer.h"
#include "jinja/parser.h"
#include "jinja/runtime.h"
#include "kvf_chat_guard.h"
#include "log.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <mutex>

#if __has_include(<pthread.h>)
#include <pthread.h>
#define KVF_CHAT_THREADS
#endif

using json = common_json;

struct kvf_chat {
    common_chat_templates_ptr templates;
};

struct kvf_chat_parser {
    common_peg_arena   arena;
    common_chat_format format;
    std::string        prompt;  // what the template has begun the answer with: the parser wants to see it
};

namespace {

thread_local char last_error[512];

// Of the tools of the chat that is rendered: their parameters for the grammar, by the tools' names.
thread_local const json * schemas = nullptr;

// Upstream prints what it thinks of a template, and answers, to the terminal at each call.
void be_silent() {
    static std::once_flag once;
    std::call_once(once, [] { common_log_set_verbosity_thold(-1); });
}

// Runs a template. What costs too much is an error like any other.
template <typename Work> void bounded(Work && work) {
    try {
        work();
    } catch (const jinja::too_costly &) {
        throw std::runtime_error(
            "the template takes more than " + std::to_string(jinja::MAX_SPENT) + " steps, or " +
            std::to_string(jinja::MAX_DEPTH) + " within each other");
    }
}

void check_size(size_t size) {
    if (size > KVF_CHAT_TEMPLATE_BYTES) {
        throw std::length_error(
            "it has " + std::to_string(size) + " bytes, and " + std::to_string(KVF_CHAT_TEMPLATE_BYTES) + " is the most");
    }
}

kvf_chat_text copied(const std::string & text) {
    auto * data = static_cast<char *>(malloc(text.size() + 1));
    if (!data) {
        throw std::bad_alloc();
    }
    memcpy(data, text.c_str(), text.size() + 1);
    return { data, text.size() };
}

json strings(const std::vector<std::string> & values) {
    json out = json::array();
    for (const auto & value : values) {
        out.push_back(value);
    }
    return out;
}

json told(const common_chat_params & params) {
    json patterns = json::array();
    json words    = json::array();
    for (const auto & trigger : params.grammar_triggers) {
        if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_WORD) {
            words.push_back(trigger.value);
        } else if (trigger.type == COMMON_GRAMMAR_TRIGGER_TYPE_PATTERN_FULL) {
            patterns.push_back("^" + trigger.value + "$");
        } else {
            patterns.push_back(trigger.value);
        }
    }
    json borders = json::array();
    for (const auto & border : params.message_delimiters.delimiters) {
        borders.push_back(json::array({ common_chat_role_to_string(border.role), border.delimiter }));
    }
    json thinking = json::array();
    if (!params.thinking_start_tag.empty() && !params.thinking_end_tags.empty()) {
        thinking.push_back(params.thinking_start_tag);
        for (const auto & tag : params.thinking_end_tags) {
            thinking.push_back(tag);
        }
    }
    json out = json::object();
    out["prompt"]            = params.prompt;
    out["generation_prompt"] = params.generation_prompt;
    out["grammar"]           = params.grammar;
    out["lazy"]              = params.grammar_lazy;
    out["triggers"]          = patterns;
    out["words"]             = words;
    out["preserved"]         = strings(params.preserved_tokens);
    out["stops"]             = strings(params.additional_stops);
    out["borders"]           = borders;
    out["thinks"]            = params.supports_thinking;
    out["thinking"]          = thinking;
    return out;
}

// The fixed texts of a format, one after the other: names of tools and of their arguments are among them.
std::string marks(const common_peg_arena & arena) {
    std::string out;
    for (common_peg_parser_id id = 0; id < arena.size(); id++) {
        if (const auto * fixed = std::get_if<common_peg_literal_parser>(&arena.get(id))) {
            out += fixed->literal + "\n";
        }
    }
    return out;
}

common_chat_templates_inputs inputs_of(const kvf_chat & chat, const json & asked) {
    common_chat_templates_inputs inputs;
    inputs.messages         = common_chat_msgs_parse_oaicompat(asked.at("messages"));
    inputs.tools            = common_chat_tools_parse_oaicompat(asked.at("tools"));
    inputs.tool_choice      = common_chat_tool_choice_parse_oaicompat(asked.at("tool_choice"));
    inputs.enable_thinking  = asked.at("enable_thinking").get<bool>();
    inputs.reasoning_format = common_reasoning_format_from_name(asked.at("reasoning"));
    const auto & parallel   = asked.at("parallel");
    inputs.parallel_tool_calls =
        parallel.is_boolean() ? parallel.get<bool>() : common_chat_templates_get_caps(chat.templates.get())["supports_parallel_tool_calls"];
    for (const auto & [name, value] : asked.at("kwargs").items()) {
        inputs.chat_template_kwargs[name] = value.dump();
    }
    if (asked.at("continued").get<bool>()) {
        inputs.continue_final_message = COMMON_CHAT_CONTINUATION_AUTO;
        inputs.add_generation_prompt  = false;
    }
    return inputs;
}

// Recursion of the parser and of its results is no deeper than this: braces and brackets that are open at once.
int depth_of(const std::string & text) {
    int depth   = 0;
    int deepest = 0;
    for (const char c : text) {
        if (c == '{' || c == '[') {
            deepest = std::max(deepest, ++depth);
        } else if ((c == '}' || c == ']') && depth > 0) {
            depth--;
        }
    }
    return deepest;
}

// A level takes 3 KiB at most (x86-64, GCC 12, Gemma 4's objects). SHALLOW fits into the smallest stacks that threads have.
constexpr int    SHALLOW     = 120;
constexpr size_t LEVEL_BYTES = 6144;

// Runs `work` on a stack with room for so many levels. False if there is none. A file full of colours for a terminal has
// thousands of open brackets, and a call may write it. Memory is taken for the levels that are used alone.
bool with_room_for(int depth, const std::function<void()> & work) {
    if (depth <= SHALLOW) {
        work();
        return true;
    }
#ifdef KVF_CHAT_THREADS
    struct job {
        const std::function<void()> & work;
        std::exception_ptr            failed;
    } todo = { work, nullptr };
    const auto run = [](void * data) -> void * {
        auto * todo = static_cast<job *>(data);
        try {
            todo->work();
        } catch (...) {
            todo->failed = std::current_exception();
        }
        return nullptr;
    };
    pthread_attr_t attributes;
    pthread_t      thread;
    if (depth > KVF_CHAT_DEPTH || pthread_attr_init(&attributes) != 0) {
        return false;
    }
    const bool began = pthread_attr_setstacksize(&attributes, KVF_CHAT_DEPTH * LEVEL_BYTES) == 0 &&
                       pthread_create(&thread, &attributes, run, &todo) == 0;
    pthread_attr_destroy(&attributes);
    if (!began) {
        return false;
    }
    pthread_join(thread, nullptr);
    if (todo.failed) {
        std::rethrow_exception(todo.failed);
    }
    return true;
#else
    return false;
#endif
}

// Where the parts of an answer are that `common_chat_msg` tells of, in bytes of the parser's input.
struct places {
    size_t            read  = 0;  // the end of the last part
    size_t            plain = 0;  // the end of what is in front of the first call that is not closed
    size_t            first = 0;  // the end of what is in front of the first call
    std::vector<bool> closed;     // of the calls that have a name
    bool              open  = false;

    void look(const common_peg_ast_arena & ast, common_peg_ast_id id) {
        const auto & node   = ast.get(id);
        const auto & tag    = node.tag;
        const size_t before = closed.size();
        if (tag == common_chat_peg_builder::TOOL_NAME) {
            closed.push_back(false);
            open = true;
        }
        for (const auto child : node.children) {
            look(ast, child);
        }
        if (tag == common_chat_peg_builder::CONTENT || tag == common_chat_peg_builder::REASONING) {
            read  = std::max(read, node.end);
            plain = open ? plain : std::max(plain, node.end);
            first = closed.empty() ? std::max(first, node.end) : first;
        }
        if (tag.rfind(common_chat_peg_builder::TOOL, 0) == 0 && (open || closed.size() > before)) {
            read = std::max(read, node.end);  // what stands in front of a name is told nowhere before there is one
        }
        const bool ends = tag == common_chat_peg_builder::TOOL || tag == common_chat_peg_builder::TOOL_CLOSE;
        if (ends && !node.is_partial && open) {
            closed.back() = true;
            open          = false;
            plain         = std::max(plain, node.end);
        }
    }
};

json not_understood() {
    json out = json::object();
    out["understood"] = false;
    return out;
}

// text: with the prompt that the parser wants to see.
json read(const kvf_chat_parser & parser, const std::string & text) {
    common_peg_parse_context ctx(text, COMMON_PEG_PARSE_FLAG_LENIENT);
    const auto result = parser.arena.parse(ctx);
    if (result.fail()) {
        return not_understood();
    }
    common_chat_msg said;
    std::unique_ptr<common_chat_peg_mapper> mapper;
    if (parser.format == COMMON_CHAT_FORMAT_PEG_GEMMA4) {
        mapper = std::make_unique<common_chat_peg_gemma4_mapper>(said);
    } else if (parser.format == COMMON_CHAT_FORMAT_PEG_MINIMAX_M3) {
        mapper = std::make_unique<common_chat_peg_minimax_m3_mapper>(said);
    } else {
        mapper = std::make_unique<common_chat_peg_mapper>(said);
    }
    mapper->from_ast(ctx.ast, result);
    places found;
    for (const auto node : result.nodes) {
        found.look(ctx.ast, node);
    }
    const auto within = [&](size_t end) { return end > parser.prompt.size() ? end - parser.prompt.size() : 0; };
    json calls = json::array();
    for (size_t i = 0; i < said.tool_calls.size(); i++) {
        const auto & call = said.tool_calls[i];
        json one = json::object();
        one["name"]      = call.name;
        one["arguments"] = call.arguments;
        one["id"]        = call.id;
        one["closed"]    = result.success() || (i < found.closed.size() && found.closed[i]);
        calls.push_back(one);
    }
    json out = json::object();
    out["understood"] = true;
    out["content"]    = said.content;
    out["reasoning"]  = said.reasoning_content;
    out["calls"]      = calls;
    out["read"]       = within(result.success() ? result.end : found.read);
    out["plain"]      = within(result.success() ? result.end : found.plain);
    out["first"]      = within(found.first);
    return out;
}

}  // namespace

void kvf_chat_fail(const char * text) {
    snprintf(last_error, sizeof(last_error), "%s", text);
}

const common_json * kvf_chat_parameters(const std::string & tool) {
    return schemas && schemas->contains(tool) ? &schemas->at(tool) : nullptr;
}

const char * kvf_chat_last_error(void) {
    return last_error;
}

int32_t kvf_chat_abi(void) {
    return KVF_CHAT_ABI;
}

void kvf_chat_free(kvf_chat_text text) {
    free(text.data);
}

int32_t kvf_chat_open(const char * source, size_t size, const char * bos, const char * eos, kvf_chat ** chat, kvf_chat_text * caps) {
    return kvf_chat_guarded(KVF_CHAT_STATUS_TEMPLATE, [&] {
        be_silent();
        check_size(size);
        auto made = std::make_unique<kvf_chat>();
        bounded([&] { made->templates = common_chat_templates_init(nullptr, std::string(source, size), bos, eos); });
        json can = json::object();
        for (const auto & [name, value] : common_chat_templates_get_caps(made->templates.get())) {
            can[name] = value;
        }
        *caps = copied(can.dump());
        *chat = made.release();
    });
}

void kvf_chat_close(kvf_chat * chat) {
    delete chat;
}

int32_t kvf_chat_render(kvf_chat * chat, const char * asked, size_t size, kvf_chat_text * rendered, kvf_chat_parser ** parser) {
    common_chat_templates_inputs inputs;
    json                         parameters;
    const auto status = kvf_chat_guarded(KVF_CHAT_STATUS_ARGUMENT, [&] {
        const auto given = kvf_chat_json(asked, size);
        inputs     = inputs_of(*chat, given);
        parameters = given.at("schemas");
    });
    if (status != KVF_CHAT_STATUS_SUCCESS) {
        return status;
    }
    return kvf_chat_guarded(KVF_CHAT_STATUS_TEMPLATE, [&] {
        common_chat_params params;
        struct lent {
            explicit lent(const json & parameters) { schemas = &parameters; }
            ~lent() { schemas = nullptr; }
        } until_rendered(parameters);
        bounded([&] { params = common_chat_templates_apply(chat->templates.get(), inputs); });
        auto made = std::make_unique<kvf_chat_parser>();
        made->format = params.format;
        if (params.parser.empty()) {
            made->arena = build_chat_peg_parser([](common_chat_peg_builder & p) { return p.content(p.rest()) + p.end(); });
        } else {
            made->arena.load(params.parser);
            made->prompt = params.generation_prompt;
        }
        auto out = told(params);
        out["marks"] = marks(made->arena);
        *rendered = copied(out.dump_safe());
        *parser   = made.release();
    });
}

int32_t kvf_chat_plain(const char * source, size_t size, const char * variables, size_t variables_size, kvf_chat_text * rendered) {
    jinja::lexer_result tokens;
    jinja::program      program;
    const auto status = kvf_chat_guarded(KVF_CHAT_STATUS_SOURCE, [&] {
        be_silent();
        check_size(size);
        jinja::lexer lexer;
        tokens  = lexer.tokenize(std::string(source, size));
        program = jinja::parse_from_tokens(tokens);
    });
    if (status != KVF_CHAT_STATUS_SUCCESS) {
        return status;
    }
    return kvf_chat_guarded(KVF_CHAT_STATUS_TEMPLATE, [&] {
        jinja::context ctx(tokens.source);
        jinja::global_from_json(ctx, kvf_chat_json(variables, variables_size), false);
        bounded([&] {
            jinja::runtime runtime(ctx);
            *rendered = copied(jinja::runtime::gather_string_parts(runtime.execute(program))->as_string().str());
        });
    });
}

int32_t kvf_chat_schema(const char * schema, size_t size, kvf_chat_text * grammar) {
    return kvf_chat_guarded(KVF_CHAT_STATUS_ARGUMENT, [&] {
        const auto document = common_chat_schema_from_json(kvf_chat_json(schema, size));
        *grammar = copied(build_grammar([&](const common_grammar_builder & builder) {
            builder.add_rule("root", builder.add_schema("answer", *document.root));  // a property without a name is not the root
        }));
    });
}

void kvf_chat_parser_close(kvf_chat_parser * parser) {
    delete parser;
}

int32_t kvf_chat_parse(const kvf_chat_parser * parser, const char * text, size_t size, kvf_chat_text * said) {
    return kvf_chat_guarded(KVF_CHAT_STATUS_ARGUMENT, [&] {
        const std::string answer = parser->prompt + std::string(text, size);  // a client may have begun the answer
        if (!with_room_for(depth_of(answer), [&] { *said = copied(read(*parser, answer).dump_safe()); })) {
            *said = copied(not_understood().dump_safe());
        }
    });
}
