"""How a model wants to be asked about a document: by the chat template of its file."""

from __future__ import annotations

import jinja2
import llama_cpp
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from kvflash_ggml.errors import ConfigError
from kvflash_ggml.llama.llama import Llama
from kvflash_ggml.native import vocabulary

from .asks import Frame

_MARK = "KVFLASH DOCUMENT"


def frame_of(llm: Llama) -> Frame:
    """The document and the question as one message of the user, before the model's turn; plain without a template.

    ConfigError if the template cannot be used.
    """
    template = llm.metadata.get("tokenizer.chat_template")
    if template is None:
        return Frame()
    vocab = vocabulary.of(llm.model)
    bos, eos = (vocabulary.name(vocab, token) for token in (llm.token_bos(), llm.token_eos()))
    messages = [{"role": "user", "content": _MARK}]
    try:
        formatter = Jinja2ChatFormatter(template=template, bos_token=bos, eos_token=eos)
        # forty tokens are no room for thoughts
        text = formatter(messages=messages, enable_thinking=False).prompt  # type: ignore[arg-type,unused-ignore]
    except (jinja2.TemplateError, TypeError, ValueError) as err:
        raise ConfigError(f"the chat template of this model fails: {err}; use tasks without one") from err
    before, mark, after = text.partition(_MARK)
    if not mark or _MARK in after:
        raise ConfigError("the chat template of this model does not show the user's message once; use other tasks")
    if llama_cpp.llama_vocab_get_add_bos(vocab):
        before = before.removeprefix(bos)  # the tokenizer adds it
    return Frame(
        before_document=before,
        before_answer=after,
        special=True,
        size=len(llm.tokenize(before.encode(), add_bos=False, special=True)),
    )
