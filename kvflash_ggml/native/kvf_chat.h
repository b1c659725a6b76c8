// llama.cpp's chat templates and the parsers of their answers, as a library of its own: libkvf_chat.
// Values go in and come out as JSON in UTF-8. What can fail returns a kvf_chat_status; kvf_chat_last_error() tells why, per thread.
// No exception leaves a call. Handles may be used by several threads at once, but not while they are closed.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

#include <stddef.h>
#include <stdint.h>

#ifdef __GNUC__
#pragma GCC visibility push(default)
#endif

// [cdef]
#define KVF_CHAT_ABI   3
#define KVF_CHAT_BYTES 268435456
#define KVF_CHAT_DEPTH 4096
#define KVF_CHAT_TEMPLATE_BYTES 1048576

enum kvf_chat_status {
    KVF_CHAT_STATUS_SUCCESS  =  0,
    KVF_CHAT_STATUS_ARGUMENT = -1,  // no JSON, or what cannot be asked for
    KVF_CHAT_STATUS_TEMPLATE = -2,  // the template cannot be read, or refuses these messages
    KVF_CHAT_STATUS_MEMORY   = -3,  // no memory
    KVF_CHAT_STATUS_SOURCE   = -4,  // kvf_chat_plain: the template cannot be read
};

typedef struct kvf_chat        kvf_chat;         // a template
typedef struct kvf_chat_parser kvf_chat_parser;  // of the answers to one prompt

// A text that the library has written: give it back with kvf_chat_free.
typedef struct kvf_chat_text {
    char * data;
    size_t size;
} kvf_chat_text;

int32_t      kvf_chat_abi(void);
const char * kvf_chat_last_error(void);  // of the last call on this thread that failed
void         kvf_chat_free(kvf_chat_text text);

// Reads a template of at most KVF_CHAT_TEMPLATE_BYTES. caps: an object of what it can do, names of llama.cpp to booleans.
int32_t kvf_chat_open(const char * source, size_t size, const char * bos, const char * eos, kvf_chat ** chat, kvf_chat_text * caps);
void    kvf_chat_close(kvf_chat * chat);

// A chat as a prompt. asked: {"messages", "tools", "tool_choice", "parallel", "reasoning", "enable_thinking", "kwargs", "continued",
// "schemas": an object of tools' names to parameters that the grammar is made of, where they differ from what the prompt shows}.
// rendered: {"prompt", "generation_prompt", "grammar", "lazy", "triggers", "words", "preserved", "stops", "borders", "thinks",
// "thinking": [start, ends...], "marks": the fixed texts of the answer's format}.
int32_t kvf_chat_render(kvf_chat * chat, const char * asked, size_t size, kvf_chat_text * rendered, kvf_chat_parser ** parser);
void    kvf_chat_parser_close(kvf_chat_parser * parser);

// Renders a template of at most KVF_CHAT_TEMPLATE_BYTES with these variables, an object, and nothing else: as Jinja does, within the
// bounds of kvf_chat_render. The text that comes back may be no UTF-8.
int32_t kvf_chat_plain(const char * source, size_t size, const char * variables, size_t variables_size, kvf_chat_text * rendered);

// The grammar of a JSON schema whose patterns are of the JSON text.
int32_t kvf_chat_schema(const char * schema, size_t size, kvf_chat_text * grammar);

// Reads the text of an answer, from its beginning. One with more than KVF_CHAT_DEPTH braces and brackets open at once, whatever they
// mean, is not understood: a parser takes stack for each. said: {"content", "reasoning", "calls": [{"name", "arguments", "id", "closed"}],
// "understood", "read", "plain", "first"}. understood: is there an answer that begins so? read: bytes of the text up to the end of
// the last part that is told. plain, first: bytes up to the end of the part in front of the first call that is not closed, of any call.
int32_t kvf_chat_parse(const kvf_chat_parser * parser, const char * text, size_t size, kvf_chat_text * said);

// A llama_sampler that holds an answer to a grammar; NULL, and a reason, if there is no such grammar. asked: {"grammar", "lazy", "triggers", "words",
// "prefill", "thinking"}. A lazy one waits for a trigger, and does not look for one within reasoning. vocab: a llama_vocab.
void * kvf_chat_sampler(const void * vocab, const char * asked, size_t size);
// [/cdef]

#ifdef __GNUC__
#pragma GCC visibility pop
#endif

#ifdef __cplusplus
}
#endif
