"""Grammars of strangers take bounded time and memory, or are refused; and schemas that refer to themselves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import LlamaGrammar
from support.served import answer, ask

from kvflash_ggml.batching import llama as batching
from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Failed, Sampling
from kvflash_ggml.batching.scheduler import Scheduler

CHILD = """
import json, resource, sys
from kvflash_ggml import Llama
import llama_cpp
llm = Llama(sys.argv[1], vocab_only=True, verbose=False)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # a GPU's library maps far more
most = max(4 << 30, used + (2 << 30))
resource.setrlimit(resource.RLIMIT_AS, (most, most))
(token,) = llm.tokenize(b"a", add_bos=False)
for grammar in json.load(sys.stdin):
    sampler = llama_cpp.llama_sampler_init_grammar(llm._model.vocab, grammar.encode(), b"root")
    if sampler:
        for _ in range(int(sys.argv[2])):
            llama_cpp.llama_sampler_accept(sampler, token)
    print(bool(sampler), flush=True)
"""


def accepted(model: Path, grammars: Sequence[str], *, tokens: int = 0) -> list[bool]:
    """Can each be used, and are so many tokens "a" taken then? In a process whose time and memory are bounded."""
    line = [sys.executable, "-c", CHILD, str(model), str(tokens)]
    done = subprocess.run(line, input=json.dumps(grammars), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "::=" not in done.stderr, "what strangers send is not printed"
    return [line == "True" for line in done.stdout.splitlines()]


def nested(depth: int) -> str:
    return f'root ::= {"(" * depth}"a"{")" * depth}'


def chain(length: int, each: str, last: str) -> str:
    """Rules of which each consists of the next."""
    rules = [f"r{i} ::= {each.replace('next', f'r{i + 1}')}" for i in range(length)]
    return "\n".join(["root ::= r0", *rules, f"r{length} ::= {last}"])


def test_what_would_cost_too_much(models: dict[str, Path]) -> None:
    """The stack, or memory."""
    refused = [nested(100_000), "root ::= " + "(" * 100_000, 'root ::= "a"{5,2}', f'root ::= "{"a" * 100_000}"{{2000}}']
    taken = [
        nested(1000),
        'root ::= "a"{2,5}',
        'root ::= "a"{5,}',
        "root ::= [a-z]{0,1999}",
        f'root ::= "{"a" * 9999}"{{9}}',
    ]
    assert accepted(models["dense"], [*refused, *taken]) == [False] * len(refused) + [True] * len(taken)


REFUSED = {
    "an escape": ('root ::= "\\d"', "line 1: unknown escape at \\d"),
    "a literal without an end": ('root ::= "a', "unexpected end of input"),
    "a class without an end": ('x ::= "b"\nroot ::= [z-', "unexpected end of input"),
    "a rule that is nowhere": ("root ::= foo", "Undefined rule identifier 'foo'"),
    "a second line": ('root ::= a\na ::= "b"\nb = "c"', "line 3: expecting ::= at"),
    "no root": ('a ::= "x"', "it has no rule 'root'"),
    "no grammar": ("<<<>>>", "line 1: expecting name at <<<>>>"),
    "nothing": ("", "the grammar is empty"),
    "blanks": (" \n\n", "it has no rules"),
    "recursion to the left": ('root ::= a\na ::= root "b"', "the rule 'root' begins with itself"),
    "too many ways": (chain(2500, 'next "b"', '"a"'), "too many ways"),
}


@pytest.mark.parametrize(("text", "why"), REFUSED.values(), ids=REFUSED)
def test_why_a_grammar_is_refused(llama: Callable[..., Any], tokens: Any, text: str, why: str) -> None:
    """By each way to an answer, with the parser's reason. The process lives, and the next answer comes."""
    llm, prompt = llama(kvflash=512), tokens[:20].tolist()
    grammar = LlamaGrammar.from_string(text, verbose=False)
    with pytest.raises(ValueError, match=re.escape(why)):
        llm.create_completion(prompt, max_tokens=2, grammar=grammar)
    with pytest.raises(ValueError, match=re.escape(why)):
        llm.create_chat_completion([{"role": "user", "content": "Hello"}], max_tokens=2, grammar=grammar)
    with pytest.raises(ValueError, match=re.escape(why)):
        next(llm.generate(prompt, grammar=grammar))
    llm.eval(prompt)
    with pytest.raises(ValueError, match=re.escape(why)):
        llm.sample(grammar=grammar)
    assert llm.create_completion(prompt, max_tokens=2)["usage"]["completion_tokens"] == 2


SAMPLE = """
import sys
import numpy as np
from kvflash_ggml import Llama
import llama_cpp
llm = Llama(sys.argv[1], vocab_only=True, verbose=False)
sampler = llama_cpp.llama_sampler_init_grammar(llm._model.vocab, sys.stdin.read().encode(), b"root")
data = (llama_cpp.llama_token_data * llm.n_vocab())(*((i, 0.0, 0.0) for i in range(llm.n_vocab())))
llama_cpp.llama_sampler_apply(sampler, llama_cpp.llama_token_data_array(data, len(data), -1, False))
print(sum(np.isfinite(one.logit) for one in data))
"""


def test_what_has_too_many_ways_within_a_token(models: dict[str, Path]) -> None:
    """Of a vocabulary with long rows of one character."""
    ways = " | ".join(f'"-" root "{i}"' for i in range(24))
    line = [sys.executable, "-c", SAMPLE, str(models["dense"])]
    done = subprocess.run(line, input=f'root ::= {ways} | "!"', capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2, "what is left is what the grammar allows"


def test_what_has_too_many_ways(models: dict[str, Path]) -> None:
    """Through rules that may be empty, of ever longer texts of rules, or of an ambiguous one."""
    refused = [
        chain(3, "next{0,1900}", '"a"?'),
        chain(60, "next next", '"a"?'),
        chain(100_000, "next", '"a"'),
        chain(2500, 'next "b"', '"a"'),
        'root ::= b root "y" | "x"\nb ::= c\nc ::= ""',
        'root ::= root "a" | "a"',
    ]
    assert not any(accepted(models["dense"], refused))
    ambiguous = ['root ::= "a" root "b" | "a" root "c" | "d"', 'root ::= ("a" | "a")*']
    taken = [*ambiguous, chain(60, "next next", '"a"+'), chain(1000, "next", '"a"+'), 'root ::= ([a-z]* " "?)+']
    assert accepted(models["dense"], taken, tokens=24) == [True] * len(taken)


ALLOWED = """
import json, sys
import numpy as np
from kvflash_ggml import Llama
import llama_cpp
llm = Llama(sys.argv[1], vocab_only=True, verbose=False)
text = llm.tokenize(sys.argv[2].encode(), add_bos=False)
data = (llama_cpp.llama_token_data * llm.n_vocab())()
rows = llama_cpp.llama_token_data_array(data, len(data), -1, False)
for grammar in json.load(sys.stdin):
    sampler = llama_cpp.llama_sampler_init_grammar(llm._model.vocab, grammar.encode(), b"root")
    found = []
    for token in text:
        for at, one in enumerate(data):
            one.id, one.logit = at, 0.0
        llama_cpp.llama_sampler_apply(sampler, rows)
        found.append([one.id for one in data if np.isfinite(one.logit)])
        llama_cpp.llama_sampler_accept(sampler, token)
    print(json.dumps(found), flush=True)
"""


def allowed(model: Path, text: str, grammars: Sequence[str]) -> list[list[list[int]]]:
    """The tokens that each grammar allows before each token of a text."""
    line = [sys.executable, "-c", ALLOWED, str(model), text]
    done = subprocess.run(line, input=json.dumps(grammars), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


EQUAL = {
    "(.?){200}": ".{0,200}",
    "(.?){9}": ".{0,9}",
    "([a-z]?){200}": "[a-z]{0,200}",
    "(((.?){100}){10})": ".{0,1000}",
    "((.?){30} (.?){30})*": ".*",
}
"""Ways to write one language: with many equal ways through it, and with few."""


def test_equal_ways_are_followed_once(models: dict[str, Path]) -> None:
    """Before each token as many stacks are looked at as differ, so that the work that is allowed suffices for all."""
    found = allowed(models["dense"], "information", [f"root ::= {text}" for pair in EQUAL.items() for text in pair])
    assert len(found) == 2 * len(EQUAL)
    for many, few, text in zip(found[::2], found[1::2], EQUAL, strict=True):
        assert many == few, text


@pytest.mark.parametrize("text", ["root ::= (((.?){100}){10})", "root ::= ((.?){30} (.?){30})*"])
def test_what_is_accepted_takes_bounded_work(models: dict[str, Path], text: str) -> None:
    """A thousand ways lead to a thousand others at each character. Without a bound one token takes minutes."""
    assert accepted(models["dense"], [text], tokens=8) == [True]


def test_many_words(models: dict[str, Path]) -> None:
    """A list of words is no ambiguity: the last one can be said too."""
    words = " | ".join([f'"b{i}"' for i in range(20_000)] + ['"a"'])
    assert accepted(models["dense"], [f"root ::= {words}", f"root ::= word+\nword ::= {words}"], tokens=1) == [True] * 2


def test_where_no_way_goes_on(models: dict[str, Path]) -> None:
    """The text ends: of 40,000 ways those are left that lead to no third "a", or there has never been one."""
    many = " | ".join(f'"a" next "{i}"' for i in range(200))
    rules = ['root ::= "a"* | one', f"one ::= {many.replace('next', 'two')}", f"two ::= {many.replace('next', 'last')}"]
    cut_off = "\n".join([*rules, 'last ::= "b"'])
    assert accepted(models["dense"], [cut_off, 'root ::= "b"'], tokens=4) == [True] * 2


def test_a_grammar_that_holds_the_engine_ends_its_answer(
    llama: Callable[..., Any], tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token that takes too long is the last one, and the next request has its turn."""
    scheduler = Scheduler(LlamaModel(llama(kvflash=512, kvflash_calibrate=False)))
    scheduler.start()
    try:
        sampling = Sampling(temperature=0.0, grammar="root ::= [a-z]+")
        text = tokens[:20].tolist()
        assert len(answer(scheduler, text, 3, sampling=sampling).tokens) == 3
        monkeypatch.setattr(batching, "SLOWEST_S", 0.0)  # seconds
        failed = ask(scheduler, text, 3, sampling=sampling).wait()
        assert isinstance(failed, Failed)
        assert (failed.code, "fewer ways" in failed.message) == ("invalid_value", True)
        assert len(answer(scheduler, text, 3).tokens) == 3
    finally:
        scheduler.close()
