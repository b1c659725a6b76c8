"""Turns requests into tokens: chat template, tokenizer and grammars. Several threads use it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..batching.messages import Image
from ..chat.reader import Rendered
from ..chat.values import ChatInput, Grammar
from ..errors import ConfigError, ContextFull
from ..media.files import MediaLimits
from ..native import vocabulary

if TYPE_CHECKING:
    from ..llama.llama import Llama

CHECKED = 64
"""Grammars that are known to be sound: agents send the same tools each turn."""

MOST_BYTES = 1 << 20
MOST_PER_TOKEN = 16
"""Bytes of the context's tokens that are tokenised at once, if that is more: 1 MiB of spaces takes a second or two."""

GAP = ("pre", "suf", "mid", "rep", "sep")
"""The marks before the text that precedes a gap, before the text behind it, and before what fills it.

Some models have a mark before a repository's name and one before a file's name. llama.cpp calls them FIM tokens.
"""


class Prompts(Protocol):
    """What the front needs of a model. ConfigError says what is wrong with a request."""

    template: str | None
    sees: bool
    hears: bool

    def see(self, data: bytes, limits: MediaLimits, salt: str) -> Image:
        """Read the image or sound in a file. salt: only requests of the same salt use what is kept of it.

        ConfigError if it cannot be read, HostMemoryError while too many wait.
        """
        ...

    def chat(self, asked: ChatInput) -> Rendered:
        """Render a chat as a prompt, up to where the answer begins, and say how the answer is made and read."""
        ...

    def preserved(self, texts: Sequence[str]) -> dict[int, bytes]:
        """Return the texts among these that are one token, by their tokens."""
        ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Tokenize a text. ContextFull for one that would take too long: almost all of them exceed the context."""
        ...

    def detokenize(self, tokens: Sequence[int]) -> bytes: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def gap(self) -> Mapping[str, int]:
        """Tokens that mark a gap to fill, by the names of `GAP`; none if the model has not all that it takes."""
        ...

    def check_grammar(self, grammar: Grammar | str, salt: str) -> None:
        """Check a grammar. salt: one that was checked for a salt is known to be sound to its requests, and not to
        others.
        """
        ...

    def schema_grammar(self, schema: Any, *, strict: bool, where: str) -> tuple[str, tuple[str, ...]]:
        """See `formats.grammar_of`."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """What /props and /v1/models tell of the model."""
        ...


class LlamaPrompts:
    """template: in place of the model's own, None for that. Reads the vocabulary only, which nothing changes."""

    def __init__(self, llm: Llama, template: str | None = None) -> None:
        import llama_cpp

        from ..chat.templates import ChatTemplate
        from ..llama.serving import image_reader_of

        self._llm = llm
        self._vocab = vocab = vocabulary.of(llm.model)
        self.template = template if template is not None else llm.metadata.get("tokenizer.chat_template") or None
        bos, eos = llm.token_bos(), llm.token_eos()
        self._bos, self._eos = vocabulary.name(vocab, bos), vocabulary.name(vocab, eos)
        self._incomplete = vocabulary.incomplete(vocab)
        self._pieces: dict[int, bytes] = {}
        self._chat = None
        if self.template is not None:
            try:
                self._chat = ChatTemplate(self.template, bos=self._bos, eos=self._eos)
            except ConfigError as err:
                raise ConfigError(
                    f"the chat template cannot be read: {err}: give another with --chat-template-file"
                ) from err
        found = {name: getattr(llama_cpp, f"llama_vocab_fim_{name}")(vocab) for name in GAP}
        self.gap = {name: token for name, token in found.items() if token != -1}
        if not {"pre", "suf", "mid"} <= set(self.gap):
            self.gap = {}
        self._images = image_reader_of(llm)
        self.sees = self._images is not None and self._images.encoder.sees
        self.hears = self._images is not None and self._images.encoder.hears
        self._checked = lru_cache(CHECKED)(self._check_grammar)

    @property
    def n_vocab(self) -> int:
        return self._llm.n_vocab()

    def see(self, data: bytes, limits: MediaLimits, salt: str) -> Image:
        assert self._images is not None
        return self._images.read(data, limits, salt)

    def chat(self, asked: ChatInput) -> Rendered:
        if self._chat is None:
            raise ConfigError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template-file"
            )
        return self._chat.render(asked)

    def preserved(self, texts: Sequence[str]) -> dict[int, bytes]:
        found = {text: self._tokenize(text.encode(), False, True) for text in texts}
        return {tokens[0]: text.encode() for text, tokens in found.items() if len(tokens) == 1}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data, n_ctx = text.encode("utf-8", "replace"), self._llm.n_ctx()
        limit = max(MOST_BYTES, MOST_PER_TOKEN * n_ctx)
        if len(data) > limit:
            raise ContextFull(
                f"the text has {len(data)} bytes, and {limit} is the most that is tokenised at once: start the "
                f"server with a larger -c, or split it"
            )
        # a chat template writes what the tokenizer would add
        adds = add_special and not (self._bos and text.startswith(self._bos))
        return self._tokenize(data, adds, parse_special)

    def _tokenize(self, data: bytes, add_special: bool, parse_special: bool) -> list[int]:
        vocabulary.check(data, self._incomplete)
        return vocabulary.tokenize(self._vocab, data, add_special=add_special, parse_special=parse_special)

    def detokenize(self, tokens: Sequence[int]) -> bytes:
        text = b"".join(map(self._piece, tokens))
        # as upstream: a tokenizer puts a space behind the mark of the beginning
        return text.removeprefix(b" ") if tokens and tokens[0] == self._llm.token_bos() else text

    def _piece(self, token: int) -> bytes:
        piece = self._pieces.get(token, b"" if token < 0 else None)  # a row of an image has no text
        if piece is None:
            piece = self._pieces[token] = vocabulary.piece(self._vocab, token, special=True)
        return piece

    def check_grammar(self, grammar: Grammar | str, salt: str) -> None:
        self._checked(grammar, salt)

    def _check_grammar(self, grammar: Grammar | str, salt: str) -> None:
        import llama_cpp

        from ..runtime.samplers import sampler_of

        grammar = Grammar(text=grammar) if isinstance(grammar, str) else grammar
        llama_cpp.llama_sampler_free(sampler_of(self._vocab, grammar))

    def schema_grammar(self, schema: Any, *, strict: bool, where: str) -> tuple[str, tuple[str, ...]]:
        from ..chat import formats

        return formats.grammar_of(schema, strict=strict, where=where)

    @property
    def facts(self) -> dict[str, Any]:
        import llama_cpp

        wanted = ("general.name", "general.architecture", "general.size_label")
        general = {name.partition(".")[2]: self._llm.metadata[name] for name in wanted if name in self._llm.metadata}
        model = self._llm.model
        return {
            **general,
            "model_path": Path(self._llm.model_path).name,  # where it lies concerns its owner only
            "size": llama_cpp.llama_model_size(model),
            "n_params": llama_cpp.llama_model_n_params(model),
            "n_embd": self._llm.n_embd(),
            "n_ctx_train": llama_cpp.llama_model_n_ctx_train(model),
            "n_vocab": self.n_vocab,
            "bos_token": self._bos,
            "eos_token": self._eos,
        }
