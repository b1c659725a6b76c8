"""Kinds of recall tasks: documents, and what is asked about them.

Forms after RULER (arXiv:2404.06654: multi-key, multi-value, variable tracking, common words) and HELMET
(arXiv:2410.02694: JSON key-value pairs), in the wording of `scripts/train_recall` wherever that has one. Several
questions share a document, so that it is read once. `forms` (tasks_forms.py) is for models that nobody here trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvflash_ggml.errors import ConfigError

from .asks import Ask, Case, Setting
from .tasks import NOUNS, WORDS, Needle, unused_value
from .tasks_forms import forms, late
from .tasks_turning import listing, turning
from .tasks_whole import whole

MULTIKEY = 4
"""Facts of the same form in a multikey4 document."""

HOPS = 3
"""Variables in a chain, the first of which is given a number."""

PAIR_TOKENS = 64
"""A jsonkv document holds fewer pairs than tokens by this factor or more."""

COMMON = 4
"""How much more often the most frequent word of a words document comes than any other."""

Maker = Callable[[Setting, random.Random], list[Case]]


def make(kind: str, setting: Setting, *, seed: int) -> list[Case]:
    """One trial of a kind: cases that together ask once at every depth. The same arguments give the same cases."""
    if kind not in KINDS:
        raise ConfigError(f"there is no task {kind!r}: use one of {', '.join(KINDS)}")
    return KINDS[kind](replace(setting, seed=seed), random.Random(f"{kind} {seed}"))


def depth_label(depth: float) -> str:
    return f"{depth:.0%}"


def single(setting: Setting, rng: random.Random) -> list[Case]:
    """A document for each depth, with one fact."""
    return [case for depth in setting.depths for case in _needles(setting, rng, (depth,), others=0)]


def multikey(setting: Setting, rng: random.Random) -> list[Case]:
    """Four facts of the same form; those at the depths are asked for."""
    cases = []
    for at in range(0, len(setting.depths), MULTIKEY):
        depths = setting.depths[at : at + MULTIKEY]
        cases += _needles(setting, rng, depths, others=MULTIKEY - len(depths))
    return cases


def chat(setting: Setting, rng: random.Random) -> list[Case]:
    """As multikey, with the document and the question in one ChatML message."""
    begin = "<|im_start|>user\n"
    room = setting.n_tokens - len(setting.tokenize(begin))
    out = []
    for case in multikey(Setting(setting.text, setting.tokenize, room, setting.depths), rng):
        shift = setting.n_tokens - room
        asks = tuple(
            Ask(
                tail=f"{ask.tail.split('?')[0].lstrip()}?<|im_end|>\n<|im_start|>assistant\n",
                answer=ask.answer,
                label=ask.label,
                gold=tuple((lo + shift, hi + shift) for lo, hi in ask.gold),
            )
            for ask in case.asks
        )
        out.append(Case(document=begin + case.document, asks=asks, special=True))
    return out


def reworded(setting: Setting, rng: random.Random) -> list[Case]:
    """As multikey, in words that no training template uses."""
    facts = setting.facts(rng, len(setting.depths))
    lines = [
        (depth, f"Please write down that {fact.name} has {fact.noun} {fact.value}.")
        for depth, fact in zip(setting.depths, facts, strict=True)
    ]
    document = setting.document(rng, lines)
    asks = [
        Ask(
            tail=f"\nWhich {fact.noun} does {fact.name} have? {fact.name} has {fact.noun}",
            answer=fact.value,
            label=depth_label(depth),
            gold=(setting.span(document, line, fact.value),),
        )
        for fact, (depth, line) in zip(facts, lines, strict=True)
    ]
    return [Case(document=document, asks=tuple(asks))]


def multivalue(setting: Setting, rng: random.Random) -> list[Case]:
    """One name with a value under each of several nouns, asked for one by one."""
    nouns = rng.sample(NOUNS, len(NOUNS))
    name = setting.facts(rng, 1)[0].name
    cases = []
    for at in range(0, len(setting.depths), len(nouns)):
        facts = [
            (depth, Needle(noun=noun, name=name, value=unused_value(setting.text, rng)))
            for depth, noun in zip(setting.depths[at:], nouns, strict=False)
        ]
        cases.append(_case(setting, rng, facts, facts))
    return cases


def vartrack(setting: Setting, rng: random.Random) -> list[Case]:
    """A number, a variable set from it further on, and one set from that one: asked for after 0, 1 and 2 hops."""
    names = [fact.name.replace(" ", "_") for fact in setting.facts(rng, HOPS)]
    value = unused_value(setting.text, rng)
    depths = sorted(rng.uniform(0.05, 0.9) for _ in names)
    lines = [f"{name} = {source}" for name, source in zip(names, [value, *names], strict=False)]
    document = setting.document(rng, list(zip(depths, lines, strict=True)))
    asks = [
        Ask(
            tail=f"\nassert {name} ==",
            answer=value,
            label=f"{hops} hops",
            gold=tuple(setting.span(document, line) for line in lines[: hops + 1]),
        )
        for hops, name in enumerate(names)
    ]
    return [Case(document=document, asks=tuple(asks))]


def jsonkv(setting: Setting, rng: random.Random) -> list[Case]:
    """One large JSON object and nothing else; the pairs at the depths are asked for."""
    lines: list[str] = []
    keys: list[tuple[str, str]] = []
    total = 0
    while total < setting.n_tokens - PAIR_TOKENS:
        # after a fixed letter, so that a key is a name to models that know only names
        keys.append((f"v{rng.randrange(16**7):07x}", f"{rng.randrange(10**7):07d}"))
        lines.append(f'    "{keys[-1][0]}": "{keys[-1][1]}",')
        total += len(setting.tokenize(lines[-1] + "\n"))
    document = "data = {\n" + "\n".join(lines) + "\n}\n"
    asks = []
    for depth in setting.depths:
        at = min(len(lines) - 1, int(depth * len(lines)))
        gold = (setting.span(document, lines[at], keys[at][1]),)
        asks.append(Ask(tail=f'\ndata["{keys[at][0]}"] == "', answer=keys[at][1], label=depth_label(depth), gold=gold))
    return [Case(document=document, asks=tuple(asks))]


def words(setting: Setting, rng: random.Random) -> list[Case]:
    """A list of words, one of which is much more frequent."""
    common, *others = rng.sample(WORDS, len(WORDS) // 2)
    pool = [common] * COMMON + others
    picked: list[str] = []
    total = 0
    while total < setting.n_tokens - PAIR_TOKENS:
        some = rng.choices(pool, k=PAIR_TOKENS // 8)
        total += len(setting.tokenize(" " + " ".join(some)))
        picked += some
    tail = "\nQuestion: What is the most frequent word?\nAnswer:"
    return [Case(document=" ".join(picked) + "\n", asks=(Ask(tail=tail, answer=common, label="all"),))]


KINDS: dict[str, Maker] = {
    "single": single,
    "multikey4": multikey,
    "multivalue": multivalue,
    "vartrack": vartrack,
    "jsonkv": jsonkv,
    "words": words,
    "reworded": reworded,
    "chat": chat,
    "forms": forms,
    "late": late,
    "turning": turning,
    "listing": listing,
    "whole": whole,
}

FREE = frozenset({"forms", "late", "turning", "listing", "whole"})
"""Kinds that are asked in the model's own chat, and answered in its own words."""


def _needles(setting: Setting, rng: random.Random, depths: Sequence[float], *, others: int) -> list[Case]:
    facts = setting.facts(rng, len(depths) + others)
    asked = list(zip(depths, facts, strict=False))
    extra = [(rng.random(), fact) for fact in facts[len(depths) :]]
    return [_case(setting, rng, asked, [*asked, *extra])]


def _case(
    setting: Setting, rng: random.Random, asked: Sequence[tuple[float, Needle]], facts: Sequence[tuple[float, Needle]]
) -> Case:
    document = setting.document(rng, [(depth, fact.sentence) for depth, fact in facts])
    asks = tuple(
        Ask(
            tail=f"\n{fact.question} {fact.lead}",
            answer=fact.value,
            label=depth_label(depth),
            gold=(setting.span(document, fact.sentence, fact.value),),
        )
        for depth, fact in asked
    )
    return Case(document=document, asks=asks)
