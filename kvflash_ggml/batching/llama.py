"""A `Llama` as the model of a scheduler."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arrays import Int32s
from ..chat.values import Grammar
from ..errors import ConfigError
from ..llama import preview
from ..logs import Progress
from ..native import vocabulary
from ..native.library import build_info
from ..runtime.bias import with_bias
from ..runtime.task import Task, TaskRequest
from ..sequence import together
from ..speculation.draft import DraftStats
from ..speculation.loop import ANOTHER
from ..state.session import SessionState
from ..store.swapped import SwappedText
from ..store.texts import usable
from .behind import PREVIEW
from .logprobs import PromptLogprobs, logprob_of
from .messages import Image, Logprob, Request
from .model import Paused, Residency, ResidencyObserver, ServedText

if TYPE_CHECKING:
    from ..llama.llama import Llama
    from ..llama.stats import PoolStats
    from ..runtime.saving import Saver
    from ..runtime.task import Pending
    from ..runtime.text import PromptEnd


class SwappedSequence:
    """A swapped-out text of a `Llama`. read_otherwise: see `LlamaModel`. end: see `runtime.text.Text`."""

    def __init__(
        self, saved: SessionState, *, stateful: bool, read_otherwise: bool = False, end: PromptEnd | None = None
    ) -> None:
        self.saved = saved
        self.end = end
        self.read_otherwise = read_otherwise
        self._stateful = stateful

    @property
    def tokens(self) -> Int32s:
        return self.saved.tokens

    @property
    def places(self) -> Sequence[int] | None:
        return tuple(sorted(self.saved.checkpoints)) if self._stateful else None

    def parts(self) -> Iterator[tuple[int, int]]:
        yield from self.saved.parts()
        for part in self.end or ():
            yield id(part), part.nbytes

    def release(self) -> None:
        self.saved.release()


def _levelled(steps: Sequence[Pending], max_rows: int, each: int) -> list[Pending]:
    """Give steps equally many rows: at most so many in all, and so many each. Those that have no room for them are left
    out, and are computed alone later.
    """
    rows = min(max(step.rows for step in steps), max_rows // len(steps), each)
    return [step for step in steps if step.rows == rows or step.task.level(step, rows)]


MAX_ROWS = 64
"""Rows of a step of several answers, at most. Prompts that share a step may fill it."""

SLOWEST_S = 5.0
"""For one token by a grammar; a usual one takes milliseconds. Others wait for the engine meanwhile."""


class LlamaModel:
    """Drives a text of a `Llama` with a pool; the first one has the others beside it. Errors: those of `texts_of`.

    A text of which a request had some read in another way than the model reads is not kept in the prefix cache, nor is
    one that comes from a file: who opens its folder is promised that of the model.
    """

    def __init__(self, llm: Llama, at_hand: tuple[Saver, PoolStats] | None = None) -> None:
        from ..llama.serving import texts_of

        found = [at_hand] if at_hand is not None else texts_of(llm)
        self._saver, self._stats = found[0]
        self.text = self._saver.text
        self.llm = llm
        self._images: dict[int, Sequence[Image]] = {}
        self.beside: Sequence[LlamaModel] = [LlamaModel(llm, one) for one in found[1:]]
        for one in self.beside:
            one._images = self._images
        sequence, model = self.text.pooled, self.text.model
        self.n_ctx = model.n_ctx
        self.prompt_rows = sequence.pool.n_ubatch
        self.step_rows = min(MAX_ROWS, len(sequence.engine.token))
        self.stateful = self._stats.stateful
        self._speculator, self._drafts = self.text.speculator, True  # _drafts: of the newest request
        self._is_end = partial(vocabulary.is_end, model.weights.vocab)
        self._watch = ResidencyObserver(self._stats.reasons)
        self._stats.watch(self._watch)
        self._pieces: dict[int, tuple[bytes, bool]] = {}
        self.readings, self.answers = (*self.text.readings, PREVIEW), self.text.answers
        self._reading = self._stats.reading
        self._read_otherwise = False
        self._prompt: tuple[PromptLogprobs, Request] | None = None  # whose tokens are told

    @property
    def fingerprint(self) -> str:
        facts = json.dumps(self._saver.snapshots.fingerprint, sort_keys=True)
        return hashlib.sha256(facts.encode()).hexdigest()[:32]

    @property
    def made(self) -> str:
        build = build_info()
        devices = ", ".join(device.name for device in self._stats.devices)
        return f"{devices}, {build['flavour']} build {build['patches_hash']} {build.get('cpu_library', '')}"

    def limit_prompt_steps(self, rows: int | None) -> None:
        sequence = self.text.pooled
        if not sequence.config.same_bits:
            sequence.n_ubatch = min(sequence.pool.n_ubatch, rows or sequence.pool.n_ubatch)

    @property
    def tokens(self) -> Int32s:
        return self.text.ids

    def known(self, tokens: Sequence[int]) -> Int32s:
        return self.text.known(tokens)

    def usable(self, tokens: Int32s) -> int:
        places = self._stats.checkpoints if self.stateful else None
        return usable(self.tokens, places, tokens)

    def preview(self, request: Request, cached: int) -> Int32s | None:
        tokens, prefixes = request.tokens, self.text.prefixes
        if prefixes is not None and request.reuse and not request.salt:
            cached = max(cached, prefixes.usable(tokens))
        places = preview.part(tokens, cached, self.text.pooled.config.preview_share)
        return None if places is None else tokens[places]

    def begin(
        self,
        request: Request,
        *,
        branch: int | None,
        progress: Progress,
        paused: Paused | None = None,
    ) -> Task:
        text, sampling, self._drafts = self.text, request.sampling, request.drafts
        text.seed = sampling.seed
        self._watch.begin()
        for lo, hi in request.pins:
            self._stats.pin(lo, hi)
        tokens, goes_on, drawn = request.tokens, False, 0
        if paused is not None:
            drawn = len(paused.drawn)
            tokens = np.concatenate([tokens, np.asarray(paused.drawn, np.int32)])
            # else it was lost, and its tokens are read again as a prompt's
            goes_on = np.array_equal(self.tokens, tokens[:-1])
        if request.prompt_logprobs and paused is None:
            piece = cache(partial(vocabulary.piece, text.model.weights.vocab, special=True))
            self._prompt = (PromptLogprobs(request.tokens, request.logprobs or 0, piece), request)
        self._read_otherwise |= request.reading not in {None, self._reading}
        if request.images:
            self._load(request.images)
        from ..runtime.samplers import chain as chain_of

        processor = with_bias(None, dict(sampling.logit_bias), text.model.n_vocab) if sampling.logit_bias else None
        grammar = Grammar(text=sampling.grammar) if isinstance(sampling.grammar, str) else sampling.grammar
        if paused is None:
            sampler = chain_of(text, sampling, tokens, grammar=grammar, processor=processor)
        else:
            sampler = paused.sampler
        return Task(
            self._saver,
            TaskRequest(
                tokens=tokens[-1:] if goes_on else tokens,
                follows=goes_on,
                sampler=sampler,
                sample=None if grammar is None else self._draw_in_time,
                greedy=sampling.keeps_likeliest and processor is None and grammar is None,
                drawn=paused is not None,
                most=request.max_tokens - drawn,
                branch=branch,
                reading=request.reading,
                answer=request.answer,
                drafts=request.drafts,
                # a folder is shared by all that read it
                cached=request.reuse and not request.salt and not self._read_otherwise,
                progress=progress,
                on_logits=None if self._prompt is None else self._prompt[0].take,
                together=True,
            ),
        )

    def ended(self) -> None:
        self._prompt = None
        self._images.pop(id(self), None)

    def _draw_in_time(self, pos: int) -> int:
        """Draw a token that a grammar holds. ConfigError where that takes too long."""
        text = self.text
        token = text.draw(pos)
        if text.sampled_s > SLOWEST_S:
            raise ConfigError(
                f"to choose a token by this grammar took {text.sampled_s:.1f} s, and {SLOWEST_S:g} s is the most: write"
                " it so that there are fewer ways to read one text"
            )
        return token

    def _load(self, images: Sequence[Image]) -> None:
        """Have the rows of these images, and of those of all running requests, known to the steps that come."""
        self._images[id(self)] = images
        self.text.pooled.pool.media.begin()
        for image in chain(*self._images.values()):
            image.load()

    def compute(self, pending: Sequence[Pending]) -> None:
        if self.text.pooled.engine.info.recurrent:
            pending = _levelled(pending, self.step_rows, self.text.pooled.engine.info.rs_planes + 1)
        began = time.perf_counter()
        try:
            errors = together.compute([(step.sequence, step.step) for step in pending], again=False)
        except Exception as err:  # a step could not be taken back: its device is lost
            for step in pending:
                step.computed, step.error = True, err
            return
        seconds, rows = time.perf_counter() - began, sum([step.rows for step in pending])
        for step, error in zip(pending, errors, strict=True):
            step.computed, step.error = bool(step.step.codes), error
            step.seconds, step.beside = seconds, rows - step.rows

    def deal(self, answered: Sequence[tuple[ServedText, int]]) -> None:
        alone = answered[0][0] if len(answered) == 1 else None
        why_not = ANOTHER if alone is not None else f"{len(answered)} texts are decoded together"
        for text in sorted((self, *self.beside), key=lambda text: text is alone):  # who has them gives them back first
            if text._speculator is not None:
                text._speculator.lend(None if text is alone else why_not)
        if not self.text.pooled.config.is_elastic:
            return
        wanted = {}
        for one, tokens in answered:
            assert isinstance(one, LlamaModel)
            wanted[one.text.pooled.seq] = min(tokens, one.n_ctx)
        self.text.pooled.pool.deal(wanted)

    def pause(self, drawn: Sequence[int]) -> Paused:
        return Paused(tuple(drawn), self.text.sampler)

    def piece(self, token: int) -> bytes:
        return self._known(token)[0]

    def ends(self, token: int) -> bool:
        return self._known(token)[1]

    def _known(self, token: int) -> tuple[bytes, bool]:
        cached = self._pieces.get(token)
        if cached is None:
            # a row of an image has a number below 0
            piece = vocabulary.piece(self.text.model.weights.vocab, token, special=False) if token >= 0 else b""
            cached = self._pieces[token] = (piece, self._is_end(token))
        return cached

    def logprob(self, token: int, top: int) -> Logprob:
        return logprob_of(token, self.text.logits_row(self.text.n_tokens - 1).copy(), top, self.piece)

    def prompt_logprobs(self) -> tuple[Logprob, ...]:
        assert self._prompt is not None
        (told, request), self._prompt = self._prompt, None
        last = self._stats.last
        if request.reading == "exact" and last.read_whole < last.read:
            raise ConfigError(
                f"{last.read - last.read_whole} of {last.read} tokens of this prompt did not see all before them: the "
                f"layer buffers hold fewer. Start the server with a larger --kvflash-stage, or ask for the "
                f'pool\'s numbers with "kvflash": {{"reading": "pool"}}'
            )
        return told.all()

    def checkpoint(self) -> None:
        if self.stateful:
            self._saver.checkpoint()

    def swap_out(self) -> SwappedSequence:
        read_otherwise, end = self._read_otherwise, self.text.end
        return SwappedSequence(self._saver.park(), stateful=self.stateful, read_otherwise=read_otherwise, end=end)

    def swap_in(self, swapped: SwappedText) -> None:
        assert isinstance(swapped, SwappedSequence)
        self._saver.resume(swapped.saved)
        self._read_otherwise, self.text.end = swapped.read_otherwise, swapped.end

    def reset(self) -> None:
        self.unpin()
        self.text.reset()
        self._read_otherwise = False

    def unpin(self) -> None:
        self._stats.unpin()
        for lo, hi in self._stats.configured_pins:
            self._stats.pin(lo, hi)

    def pin(self, lo: int, hi: int) -> None:
        self._stats.pin(lo, hi)

    def write(self, swapped: SwappedText, path: Path, *, sync: bool) -> None:
        assert isinstance(swapped, SwappedSequence)
        self._saver.write(swapped.saved, path, sync=sync)

    def read(self, path: Path) -> SwappedSequence:
        # a file does not say how requests had it read
        return SwappedSequence(self._saver.snapshots.load(path), stateful=self.stateful, read_otherwise=True)

    def when_full(self, give_way: Callable[[], bool]) -> None:
        self._stats.when_full(give_way)

    def explain(self, wanted: bool) -> None:
        self._stats.explain(wanted)

    def residency(self) -> Residency:
        return self._watch.now

    def counters(self) -> Mapping[str, Any]:
        stats, drafts = self._stats, self._speculator
        last, total = (DraftStats(), DraftStats()) if drafts is None else drafts.counted()
        last = last if self._drafts else DraftStats()  # it has those of an earlier request
        return {
            "pool": stats.pool,
            "share": stats.share,
            "length": stats.length,
            "chunks": stats.chunks,
            "resident": stats.resident,
            "page_ins": stats.page_ins,
            "page_outs": stats.page_outs,
            "page_bytes": stats.page_bytes,
            "host_bytes": stats.host_bytes,
            "spilled_bytes": stats.spilled_bytes,
            "device_bytes": stats.device_bytes,
            "drafted": last.drafted,
            "accepted": last.accepted,
            "replaced": last.replaced,
            "drafted_total": total.drafted,
            "accepted_total": total.accepted,
            "replaced_total": total.replaced,
            "evicted_mass": stats.evicted_mass,
            "policy": stats.policy,
            "read_exactly": stats.last.read_whole,
            "answered_exactly": stats.last.generated_whole,
        }

    def close(self) -> None:
        self.llm.close()
