"""`Llama`: a drop-in for `llama_cpp.Llama` whose KV cache can live in a pool of fixed size."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, suppress
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp.llama_cache import BaseLlamaCache
from llama_cpp.llama_grammar import LlamaGrammar
from llama_cpp.llama_tokenizer import LlamaTokenizer

from ..arrays import common_prefix, numbers
from ..config import PrefixCache
from ..errors import ConfigError
from ..native import vocabulary
from ..notation import stop_texts
from ..runtime.model import Closed, Model
from ..runtime.saving import Saver
from ..runtime.task import Task, TaskRequest
from ..runtime.text import Text
from . import asked, parameters
from .call_lock import CallLock, changing, locked, writing
from .context import Batch
from .opening import Opening
from .stock import Stock
from .tokenizer import Ends, IncrementalTokenizer, WholeTokenizer, check_tokens

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..chat.values import Grammar
    from ..placement.sizes import Placement
    from ..sampling import Samplers
    from ..state.session import SessionState
    from .keywords import Keywords
    from .pooled import PooledTexts
    from .preview import Previews
    from .stats import PoolStats

logger = logging.getLogger("kvflash_ggml")

Tokens = Generator[int, Sequence[int] | None, None]

HALVINGS = 2
"""How often a pool that "auto" has sized gets half as large where no context can be made with it."""

_REDIRECTING = threading.RLock()
"""Held by upstream's constructor, which redirects stdout and stderr with `verbose=False`: two would mix them up."""


class _Tokenizer(LlamaTokenizer):
    """Upstream's, with a ConfigError for a token that the model does not have: llama.cpp ends the process."""

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        check_tokens(tokens, self._model.n_vocab())
        text: bytes = super().detokenize(tokens, prev_tokens, special)
        return text


NOT_MADE = ("Failed to create llama_context", "Failed to load model")
"""What upstream says then, and where there is no room for the weights."""


def _of_text(name: str, doc: str) -> Any:
    """Return a property that reads and sets a field of the text of a `Llama`."""
    return property(
        lambda llm: getattr(llm._at_hand, name), lambda llm, value: setattr(llm._at_hand, name, value), doc=doc
    )


def _previewed(generate: Callable[..., Tokens]) -> Callable[..., Tokens]:
    """Decorate `Llama.generate`: a preview answers long prompts where the model is to make them."""
    parameters = inspect.signature(generate)

    @wraps(generate)
    def call(self: Llama, *args: Any, **kwargs: Any) -> Tokens:
        if self._previews is None:
            return generate(self, *args, **kwargs)
        bound = parameters.bind(self, *args, **kwargs)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        llm, tokens, reset = settings.pop("self"), settings.pop("tokens"), settings.pop("reset")
        return self._previews.answer(partial(generate, llm), tokens, reset, settings)

    return call


class Llama(llama_cpp.Llama):
    """`llama_cpp.Llama` with a bounded KV cache. Every upstream keyword and method works as there.

    kvflash: None for the full cache; for a pool a number of tokens, a size in bytes as "2G", or "auto"; or a
        KVFlashConfig.
    kvflash_policy, kvflash_scorer, kvflash_tau, kvflash_calibrate, kvflash_index, kvflash_deterministic,
        kvflash_reading, kvflash_preview_share, kvflash_stage, kvflash_answer, kvflash_spec, kvflash_pins,
        kvflash_spill, kvflash_host_limit: fields of KVFlashConfig, by keyword.
    kvflash_cache: a prefix cache, or the folder of one with default settings; the same as `set_cache`.
    kvflash_progress: called as (tokens evaluated, tokens to evaluate) while a prompt is read.
    rpc: servers whose devices are used before those of this machine, as ["host:port"] or "host:port,host:port"; all
        layers are offloaded then unless n_gpu_layers is given. rpc_trust: also servers that are neither on this machine
        nor in a private network. Whoever reaches a server controls its machine: docs/devices.md.
    device: names of the devices that hold layers, in their order, as "CUDA0"; "none" for none.
    override_tensor: (regular expression, device) pairs; the first match in a tensor's name decides its device.
    n_cpu_moe: number of layers with their experts in host memory: layers that are there as a whole, then the first
        layers of each device, in turn.
    fit: True, or a Fit, to choose before loading, as far as you leave them open: n_gpu_layers, tensor_split, n_cpu_moe,
        n_ubatch, n_batch, type_k, type_v, use_mmap, and the size of an "auto" pool. `placement` has the choice.
        DoesNotFit if nothing fits.

    `n_ctx` stays the logical context: it decides the positional encoding and the limits. The pool is separate. With a
    pool, n_ctx is the length the model was trained for if it is not given, flash attention is on, and swa_full is
    False: sliding-window layers keep only their window.

    use_extra_bufts: False keeps weights as the file has them, not packed for the CPU's kernels: slower, and the way
        around one that computes wrongly (`kvflash-run doctor` looks).
    mmproj: the GGUF file of the model's projector, for chats with images and sound: docs/images.md.
    draft_model: as upstream; with a pool also the GGUF file of a drafter. It does not imply logits_all with a pool: for
        logprobs give it. A draft token joins the text once the sampler has drawn it.

    Attribute kvflash_samplers: a `Sampling` for later calls, with DRY, XTC and all of llama.cpp's. Of a call's keywords
    seed, logit_bias and grammar still count then. With None, the default, all of them do.

    Several threads may use one object: a call waits for the other's to end, or for its stream's next piece. It holds
    one text: a stream that is advanced after another call has changed that raises KVFlashError.

    Raises TypeError for an unknown keyword that begins with kvflash; other unknown ones are ignored with a warning;
    RemoteError for a server that cannot be used. One that is lost later is DeviceLost.
    """

    kvflash_samplers: Samplers | None = None
    _most: int | None = None
    """Tokens that the running completion asks `generate` for at most, if that is known: no more are drafted."""
    _previews: Previews | None = None
    _draft_model: Any = None
    _pooled: PooledTexts | None = None
    _ends: Ends | None = None
    """Where the running completion ends."""
    _echoes = False
    """The running completion echoes its prompt with logprobs."""

    def __init__(self, model_path: str | os.PathLike[str], **keywords: Unpack[Keywords]) -> None:
        self._stack = contextlib.ExitStack()  # close() needs these even when nothing has been opened
        self._call_lock, self._at_hand = CallLock(), Text(Stock(self))
        self._saver = Saver(self._at_hand)
        model_path = os.fspath(model_path)
        request = parameters.read(dict(keywords), parameters.defaults)
        request.check_files(Path(model_path))
        self._at_hand.progress = request.progress
        self._opening = Opening(model_path, request, installed=llama_cpp.Llama is Llama)
        try:
            self._open()
        except BaseException:
            self._stack.close()  # a traceback may keep this object: weights and connections go at once
            raise

    __init__.__signature__ = parameters.signature()  # type: ignore[attr-defined]

    # --- construction

    def _open(self) -> None:
        """Load the model and make its pool."""
        opening = self._opening
        request, settings = opening.request, opening.request.upstream
        with opening.connected():
            opening.place()
            self._load()
            self._stack.enter_context(opening.connected())
        self._own_format = "" if settings.get("chat_format") or settings.get("chat_handler") else self.chat_format
        self._logits_all = opening.logits_all  # upstream asks it where there is no pool
        self._batch.close()  # it has room for n_ctx sequences a token: gigabytes of address space at long contexts
        self._batch = Batch(n_tokens=self.n_batch, embd=0, n_seq_max=1, verbose=self.verbose)
        self._stack.callback(self._batch.close)
        if request.n_batch is not None:
            self.n_batch = min(self._n_ctx, request.n_batch)
        self._at_hand.open(Model(self, logits_all=opening.logits_all))
        if opening.config is not None:
            self._pooled = opening.open_pool(self, self._saver)
            self._ctx = self._pooled.context
            if opening.config.reading == "preview":
                from .preview import Previews

                self._previews = Previews(self, self._saver, opening.config.preview_share)
        if request.cache is not None:
            self.set_cache(request.cache)

    def _load(self) -> None:
        """Call upstream's constructor. A pool that "auto" has sized shrinks until a context can be made with it."""
        from .formatting import bounded  # here: the class alone opens no model

        opening, path = self._opening, self._opening.path
        for opening.halvings in range(HALVINGS + 1):
            try:
                with _REDIRECTING, bounded(), contextlib.ExitStack() as self._pool_requests:
                    # upstream would allocate n_ctx rows of logits at once; here they grow with use
                    super().__init__(path, logits_all=False, **opening.request.upstream)
                return
            except ValueError as err:
                if not str(err).startswith(NOT_MADE):
                    raise
                from . import fitting

                self._stack.close()
                asked = path, opening.request, opening.endpoints
                if opening.size is None or opening.size.tight is None:
                    better = fitting.why_not(*asked)
                    if better is None or (opening.config is None and not isinstance(better, ValueError)):
                        raise  # without a pool what upstream raises stays a ValueError
                    raise better from err
                if opening.halvings == HALVINGS:
                    raise fitting.does_not_fit(*asked, opening.size) from None

    @property
    def model_params(self) -> llama_cpp.llama_model_params:
        """llama_cpp's `llama_model_params` that the weights were loaded with."""
        return self._model_params

    @model_params.setter
    def model_params(self, params: llama_cpp.llama_model_params) -> None:
        # upstream sets this before loading the model
        self._opening.load(params)
        self._model_params = params

    @property
    def placement(self) -> Placement | None:
        """Where everything is, as `fit` has chosen; None where it was not asked for."""
        return self._opening.placement

    def tokenizer(self) -> LlamaTokenizer:
        """Return upstream's tokenizer of the model's vocabulary."""
        return _Tokenizer(self)

    @property
    def tokenizer_(self) -> Any:
        """The tokenizer; upstream's interface, with a cache for texts that grow at their end."""
        return self._tokenizer

    @tokenizer_.setter
    def tokenizer_(self, tokenizer: Any) -> None:
        # upstream sets this between loading the model and making the context: the moment to size the pool
        if isinstance(tokenizer, LlamaTokenizer):
            lacking, bos = vocabulary.incomplete(self._model.vocab), self._model.token_bos
            whole = WholeTokenizer(self.tokenizer(), self._model.vocab, bos)
            tokenizer = IncrementalTokenizer(whole, bos, n_vocab=self._model.n_vocab(), incomplete=lacking)
        self._tokenizer = tokenizer
        self._pool_requests.enter_context(self._opening.size_pool(self, self._model))

    # --- the text: upstream's fields, which further texts of the model have too

    n_tokens = _of_text("n_tokens", "Tokens read so far.")
    input_ids = _of_text("input_ids", "The tokens of the text, and room for more; [n_ctx].")
    scores = _of_text("scores", "The logits of the tokens, with logits_all; [rows, n_vocab].")
    kvflash_progress = _of_text("progress", "Called as (done, total) behind the steps of prompts; None for nobody.")
    _seed = _of_text("seed", "Of the next sampler.")
    _sampler = _of_text("sampler", "Of the running answer.")

    @changing
    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after the `n_tokens` read so far. ContextFull, and nothing evaluated, if they do not fit."""
        self._at_hand.evaluate(tokens)

    @changing
    def reset(self) -> None:
        """Forget the text. Settings and pins stay."""
        self._at_hand.reset()

    @locked
    def sample(self, *args: Any, **kwargs: Any) -> int:
        """As upstream. KVFlashError where the logits to sample from are not at hand, which would end the process, and
        NotFinite where they are no numbers.
        """
        idx = kwargs.pop("idx", None)
        return self._at_hand.sample(self.n_tokens - 1 if idx is None else idx, *args, **kwargs)

    embed = changing(asked.embed_checked(llama_cpp.Llama.embed))

    def _init_sampler(self, *, text: Any = None, **settings: Any) -> Any:  # type: ignore[override]
        grammar, samplers, processor = settings.pop("grammar", None), self.kvflash_samplers, "logits_processor"
        counting = settings if samplers is None else {processor: settings.get(processor)}
        asked.check({**counting, "seed": self._seed})
        if samplers is None and grammar is None:
            return super()._init_sampler(**settings)
        from ..runtime.samplers import chain, stock_chain  # here: most answers have upstream's chain alone

        if samplers is None:
            return stock_chain(super()._init_sampler, self._at_hand.model, grammar, settings)
        prompt = self._input_ids if text is None else text
        return chain(self._at_hand, samplers, prompt, grammar=grammar, processor=settings.get(processor))

    @writing
    @_previewed
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        stopping_criteria: llama_cpp.StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | Grammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield tokens that continue the prompt, with upstream's contract: prefix reuse, `send`, drafts."""
        text, given = self._at_hand, numbers(tokens)  # once: a long list takes milliseconds
        # before any of the text at hand is cut off
        ids = text.known(given, common_prefix(self._input_ids, given))
        if len(tokens) == 0 and (reset or self.n_tokens == 0):
            raise ConfigError("the prompt has no tokens, and this model puts none before it: give it at least one")
        sampler = self._init_sampler(
            top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p, temp=temp, repeat_penalty=repeat_penalty,
            frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, tfs_z=tfs_z,
            mirostat_mode=mirostat_mode, mirostat_eta=mirostat_eta, mirostat_tau=mirostat_tau, penalize_nl=penalize_nl,
            logits_processor=logits_processor, grammar=grammar,
            text=given if reset else np.concatenate((self._input_ids, given)),
        )  # fmt: skip
        inherited = "sample" not in vars(self) and type(self).sample is Llama.sample
        penalties, samplers = (repeat_penalty, frequency_penalty, presence_penalty), self.kvflash_samplers
        likeliest = (temp, *penalties) == (0, 1, 0, 0) if samplers is None else samplers.keeps_likeliest
        most, self._most = self._most, None
        request = TaskRequest(
            tokens=ids,
            follows=not reset,
            sampler=sampler,
            sample=None if inherited else lambda pos: int(self.sample(idx=pos)),
            greedy=likeliest and inherited and logits_processor is None and grammar is None,
            stopping=stopping_criteria,
            most=most,
        )
        with closing(Task(self._saver, request).steps()) as steps:
            sent: Sequence[int] | None = None
            with suppress(StopIteration):
                while True:
                    step = steps.send(sent)
                    sent = (yield step) if isinstance(step, int) else None

    @changing
    def finish_preview(self) -> int:
        """Read the newest prompt that a preview has answered, whole. Returns its tokens; 0 where there is none."""
        return 0 if self._previews is None else self._previews.finish()

    # --- states

    @locked
    def save_snapshot(
        self,
        path: str | Path,
        *,
        length: int | None = None,
        compress: bool = False,
        wait: bool = True,
        salvage: bool = False,
    ) -> Future[int]:
        """Write the text and its memory to a file, from which this or another process goes on bit for bit.

        length: only the first tokens, None for all. With recurrent state or a sliding window it must be a position that
        has a checkpoint. compress: with Zstandard. wait: False returns as soon as what only the device holds has been
        copied; the file is written behind the decode, and is there when the future is done. Its result is the size in
        bytes. salvage: after DeviceLost, what is on this machine: its `kept` first tokens, from which a Llama on other
        devices goes on.

        A file that is there is replaced as a whole, or stays as it was. Raises SnapshotError.
        """
        return self._saver.save(Path(path), length=length, compress=compress, wait=wait, recover=salvage)

    @changing
    def load_snapshot(self, path: str | Path) -> int:
        """Continue the text of a file that `save_snapshot` has written. Returns how many tokens it has.

        Page images are read when they are needed, so the file must stay readable; it may be replaced or deleted.
        Raises SnapshotMismatch for another model, SnapshotError for a file that is damaged, ContextFull: nothing has
        changed then. With `logits_all` the rows of all tokens but the last are NaN: a file does not have them.
        """
        self._saver.go_on_from(self._saver.snapshots.load(Path(path)))
        return self._at_hand.n_tokens

    @locked
    def save_state(self) -> llama_cpp.LlamaState:
        """Return the text and its memory. Logits of all tokens are carried only with `logits_all`."""
        from . import states  # here, as below: most texts are never saved

        return states.save(self._saver)

    @changing
    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Return to a saved state of the same model and settings. SnapshotError, and no change, if it does not fit."""
        from . import states

        states.load(self._saver, state)

    # --- texts that are swapped out within this process

    @locked
    def park(self) -> SessionState:
        """Return the text and its memory as a value, to be released. The text stays, and no page image is copied.

        Raises HostMemoryError where there is no room for what only the device holds.
        """
        return self._saver.park()

    @changing
    def resume(self, parked: SessionState) -> None:
        """Go on from a text that `park` or `read_parked` has given, bit for bit. It can be resumed again.

        Raises SnapshotError where a page cannot be read, HostMemoryError: nothing has changed then.
        """
        self._saver.resume(parked)

    def write_parked(self, parked: SessionState, path: str | Path, *, sync: bool = True) -> None:
        """Write a parked text to a file as `save_snapshot` does. Raises SnapshotError.

        sync: wait until it is on the disk. Without it the file outlives this process, but perhaps no loss of power.
        """
        self._saver.write(parked, Path(path), sync=sync)

    def read_parked(self, path: str | Path) -> SessionState:
        """Open a file of `save_snapshot` or `write_parked`, to be resumed and released. Raises SnapshotError."""
        return self._saver.snapshots.load(Path(path))

    @locked
    def checkpoint(self) -> None:
        """Keep what is not pooled as it is now, so that the text can be cut to here. Nothing where all is pooled."""
        self._saver.checkpoint()

    @locked
    def newest_logits(self) -> npt.NDArray[np.single]:
        """Return a copy of the logits of the newest token. KVFlashError where none are kept."""
        row: npt.NDArray[np.single] = self._at_hand.logits_row(self.n_tokens - 1).copy()
        return row

    # --- prefix cache

    @locked
    def set_cache(self, cache: PrefixCache | BaseLlamaCache | None) -> None:
        """Use a prefix cache from now on: ours, which needs a pool, one of upstream's, or none."""
        if not isinstance(cache, PrefixCache | None) and not hasattr(cache, "__setitem__"):
            raise ConfigError(
                f"set_cache({cache!r}): a PrefixCache, such as PrefixCache(folder=...), or one of upstream's"
            )
        if cache is None or isinstance(cache, PrefixCache):
            self._saver.use(cache)
            super().set_cache(None)
        else:
            self._saver.use(None)
            super().set_cache(cache)

    def without_cache(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which nothing is taken from the prefix cache, and nothing is kept there."""
        return self._saver.uncached()

    @property
    def draft_model(self) -> Any:
        """Upstream's: a function from a text to tokens that may follow it, or None. It can be set at any time."""
        return self._draft_model

    @draft_model.setter
    def draft_model(self, model: Any) -> None:
        self._draft_model, text, texts = model, self._at_hand, self._pooled
        if texts is not None:
            if text.speculator is not None and texts.drafting is not None:
                texts.drafting = texts.drafting.after(text.speculator)
            texts.open_speculator(text, model)

    @property
    def kvflash(self) -> PoolStats | None:
        """The live state of the pool, or None without one."""
        return None if self._pooled is None else self._pooled.stats_of(self._at_hand)

    def create_chat_completion(self, *args: Any, **settings: Any) -> Any:
        """Answer a chat; with `tools`, by the model's own template, if it has one and no `chat_format` was given.

        `response_format` has one more type than upstream's, OpenAI's "json_schema". ConfigError for messages that the
        template refuses, a `tool_choice` that names no tool, and a schema or grammar that cannot be used.
        """
        from .chatting import Chatting, formatted  # here, as below: few calls are chats
        from .messages import templating

        given = formatted(args, settings)
        if "stop" in given:
            given["stop"] = stop_texts(given["stop"])
        with templating(given.get("messages")):
            if self.chat_handler is not None:
                from . import vision

                if isinstance(self.chat_handler, vision.HANDLERS):
                    if self._at_hand.sequence is not None:
                        return vision.answer(self, self._at_hand, self._call_lock.lock, **given)
                    vision.prepare(self.chat_handler)
            made = (
                Chatting(self, previews=self._previews is not None).answer(given)
                if self.chat_format == self._own_format
                else None
            )
            return super().create_chat_completion(**given) if made is None else made

    @property
    def _scores(self) -> npt.NDArray[np.single]:
        rows: npt.NDArray[np.single] = self.scores[: self.n_tokens or 1]  # upstream reads a row behind a preview
        if self._echoes and self._input_ids[0] != self.token_bos():
            # upstream takes row i for token i after BOS, and without BOS too: there row i - 1 has predicted it
            return np.concatenate((rows[:1], rows))
        return rows

    create_chat_completion.__signature__ = inspect.signature(llama_cpp.Llama.create_chat_completion)  # type: ignore[attr-defined]

    def _create_completion(  # type: ignore[override]  # the keywords between are upstream's and only passed on
        self,
        prompt: str | list[int],
        *,
        logits_processor: llama_cpp.LogitsProcessorList | None = None,
        logit_bias: dict[int, float] | None = None,
        stop: str | list[str] | None = None,
        **kwargs: Any,
    ) -> Iterator[Any]:
        asked.check({"prompt": prompt, "logits_processor": logits_processor, **kwargs})
        if logit_bias:
            from ..runtime.bias import with_bias  # here, as below: few calls ask for it

            logits_processor = with_bias(logits_processor, logit_bias, self.n_vocab())
        if self._previews is not None:
            kwargs["stopping_criteria"] = self._previews.criteria(kwargs.get("stopping_criteria"))
        stops = stop_texts(stop)
        completion: Any = super()._create_completion(prompt, logits_processor=logits_processor, stop=stops, **kwargs)
        echoes = bool(kwargs.get("echo")) and kwargs.get("logprobs") is not None and not kwargs.get("stream")
        completion = self._limited(completion, kwargs.get("max_tokens"), echoes=echoes)
        return self._call_lock.pieces(completion) if kwargs.get("stream") else self._call_lock.whole(completion)

    def _limited(self, completion: Iterator[Any], most: int | None, *, echoes: bool) -> Iterator[Any]:
        """Yield a completion. Know the limit of `generate`, where the text ends, and what `_scores` serve."""
        self._most, self._echoes = most if most and most > 0 else None, echoes
        self._ends = Ends(self._most, self._n_ctx)
        try:
            yield from completion
        finally:
            self._most, self._ends, self._echoes = None, None, False

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """As upstream."""
        text: bytes = super().detokenize(tokens, prev_tokens, special)
        if self._ends is None or prev_tokens is None:
            return text
        return self._ends.shown(text, len(tokens), len(prev_tokens) + len(tokens))

    def close(self) -> None:
        """Free the model, once the call that computes with it has ended. Later ones raise KVFlashError."""
        with self._call_lock.lock:
            try:
                self._call_lock.close()
            finally:
                super().close()
                closed: Any = Closed()
                self._ctx = self._model = self._tokenizer = closed
                if hasattr(self._at_hand, "model"):
                    self._at_hand.model.close()

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        opening, pooled = self._opening, self._at_hand.sequence is not None
        request = opening.request
        state["logits_all"] = opening.logits_all and (self.draft_model is None or pooled)
        state["tokenizer"] = request.upstream.get("tokenizer")
        state["kvflash"] = opening.config
        state |= {"rpc": list(request.rpc) or None, "rpc_trust": request.rpc_trust}
        return state | request.placement.keywords() | request.weights
