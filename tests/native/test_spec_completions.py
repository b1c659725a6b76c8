"""What callers of llama-cpp-python ask for, with drafts: the same answers, pieces and numbers as without."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inside import inside
from support.integrity import check_table

from kvflash_ggml.config import KVFlashConfig, SpecConfig
from kvflash_ggml.errors import ConfigError, KVFlashError

STRICT = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024}
WIDTH = 8


class Knowing:
    """Drafts what plain decoding has answered, one token of nine wrong."""

    def __init__(self, text: list[int]) -> None:
        self.text = text

    def __call__(self, seen: Any, **_: Any) -> Any:
        after = np.array(self.text[len(seen) : len(seen) + 20], np.intc)
        return np.where((len(seen) + np.arange(len(after))) % 9 == 8, 7, after)


@pytest.fixture
def pair(llama: Any, tokens: Any) -> Any:
    """A plain model, one that drafts what it answers, and the prompt."""

    def make(**settings: Any) -> tuple[Any, Any, list[int]]:
        prompt = tokens[300:420].tolist()
        plain = llama(**(STRICT | settings))
        text = [*prompt, *islice(plain.generate(prompt, temp=0.0), 60)]
        plain.reset()
        drafting = llama(**(STRICT | settings), kvflash_spec=SpecConfig(width=WIDTH, types=("ngram",)))
        drafting.draft_model = Knowing(text)
        return plain, drafting, prompt

    return make


def complete(llm: Any, prompt: list[int], **settings: Any) -> Any:
    answer = llm.create_completion(prompt, **({"temperature": 0.0, "seed": 3} | settings))
    return {key: answer[key] for key in ("choices", "usage")}


@pytest.mark.parametrize("most", range(1, 18))
def test_no_more_is_verified_than_is_asked_for(most: int, pair: Any) -> None:
    plain, llm, prompt = pair()
    rows: list[tuple[int, int]] = []
    prepare = inside(llm).session.prepare_drafts

    def noted(tokens: Any, *rest: Any) -> Any:
        rows.append((inside(llm).session.length, len(tokens)))
        return prepare(tokens, *rest)

    inside(llm).session.prepare_drafts = noted
    assert complete(llm, prompt, max_tokens=most) == complete(plain, prompt, max_tokens=most)
    assert all(start + count < len(prompt) + most for start, count in rows)
    assert bool(rows) == (most > 2)
    assert inside(llm).session.tokens.tolist() == inside(plain).session.tokens.tolist()
    assert llm.n_tokens == plain.n_tokens
    rows.clear()
    list(islice(llm.generate(prompt, temp=0.0), most + 20))
    assert any(start + count > len(prompt) + most for start, count in rows), "the next call is asked for no less"


@pytest.mark.parametrize("first", range(2, 14, 3))
def test_stop_strings_within_and_across_what_is_accepted(first: int, pair: Any) -> None:
    plain, llm, prompt = pair()
    text = complete(plain, prompt, max_tokens=40)["choices"][0]["text"]
    for length in (2, 9, 20):
        stop = [text[4 * first : 4 * first + length]]
        plain.reset()
        llm.reset()
        answers = [complete(one, prompt, max_tokens=40, stop=stop) for one in (llm, plain)]
        assert answers[0] == answers[1]
        assert answers[0]["choices"][0]["finish_reason"] == "stop"
        assert inside(llm).session.tokens.tolist() == inside(plain).session.tokens.tolist()
    assert llm.kvflash.spec.total.accepted > 0


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_k": 30}, {"repeat_penalty": 1.2}])
def test_log_probabilities(settings: Any, pair: Any) -> None:
    plain, llm, prompt = pair(logits_all=True)
    want = complete(plain, prompt, max_tokens=30, logprobs=4, **settings)
    llm.draft_model = Knowing(plain.input_ids[: plain.n_tokens].tolist())
    assert complete(llm, prompt, max_tokens=30, logprobs=4, **settings) == want
    assert llm.kvflash.spec.last.accepted > 0
    length = llm.n_tokens
    assert np.array_equal(llm.scores[:length], plain.scores[:length])


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "top_p": 0.9}])
def test_streamed_pieces(settings: Any, pair: Any) -> None:
    plain, llm, prompt = pair()

    def pieces(one: Any) -> list[str]:
        stream = one.create_completion(prompt, max_tokens=40, stream=True, seed=3, **({"temperature": 0.0} | settings))
        return [piece["choices"][0]["text"] for piece in stream]

    its = pieces(plain)
    llm.draft_model = Knowing(plain.input_ids[: plain.n_tokens].tolist())  # greedy drafts may never be what is drawn
    mine = pieces(llm)
    assert mine == its
    assert "".join(mine) == complete(llm, prompt, max_tokens=40, **settings)["choices"][0]["text"]
    assert llm.kvflash.spec.total.accepted > 0


def test_a_grammar(pair: Any) -> None:
    from llama_cpp.llama_grammar import LlamaGrammar

    plain, llm, prompt = pair()
    rules = 'root ::= ([a-z]+ " ")+ "."'
    told = []
    for one in (plain, llm):
        if one is llm:
            llm.draft_model = Knowing([*prompt, *told[0]])
        grammar = LlamaGrammar.from_string(rules, verbose=False)
        told.append(list(islice(one.generate(prompt, temp=0.0, grammar=grammar), 40)))
    assert told[0] == told[1]
    assert llm.kvflash.spec.last.accepted > 0


@pytest.mark.parametrize("at", range(1, 12))
def test_tokens_that_are_sent(at: int, pair: Any) -> None:
    """What was drafted beyond them is dropped."""
    plain, llm, prompt = pair()
    told = []
    for one in (llm, plain):
        stream = one.generate(prompt, temp=0.0)
        got = list(islice(stream, at))
        got.append(stream.send([11, 12, 13]))
        got += islice(stream, 12)
        assert one.n_tokens == len(prompt) + len(got) + 2
        stream.close()
        told.append((got, inside(one).session.tokens.tolist()))
    assert told[0] == told[1]


def test_an_answer_that_ends(pair: Any) -> None:
    """Where the end is drafted as well, and more behind it."""
    plain, llm, prompt = pair()
    settings = {"max_tokens": 60, "logit_bias": {plain.token_eos(): 14.0}}
    want = complete(plain, prompt, **settings)
    llm.draft_model = Knowing([*plain.input_ids[: plain.n_tokens].tolist(), plain.token_eos(), 5, 6])
    assert complete(llm, prompt, **settings) == want
    assert want["choices"][0]["finish_reason"] == "stop"
    assert 3 < want["usage"]["completion_tokens"] < 60
    assert inside(llm).session.tokens.tolist() == inside(plain).session.tokens.tolist()
    counted = llm.kvflash.spec.last
    assert counted.accepted + counted.steps + counted.plain_steps == want["usage"]["completion_tokens"]


def test_several_threads(pair: Any, tokens: Any) -> None:
    plain, llm, _ = pair()
    prompts = [np.tile(tokens[at : at + 30], 3).tolist() for at in range(0, 400, 100)] * 2
    wanted = [complete(plain, prompt, max_tokens=20) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda prompt: complete(llm, prompt, max_tokens=20), prompts)) == wanted
    check_table(inside(llm).session.table)


def test_a_stream_whose_text_is_gone_says_so_amid_drafts(pair: Any) -> None:
    _, llm, prompt = pair()
    stream = llm.generate(prompt, temp=0.0)
    list(islice(stream, 3))
    assert inside(llm).session.ahead > 0
    other = complete(llm, prompt[:60], max_tokens=5)
    with pytest.raises(KVFlashError, match="another call has used this model"):
        next(stream)
    llm.reset()
    assert complete(llm, prompt[:60], max_tokens=5) == other


def test_it_is_pickled_with_who_drafts(llama: Any, tokens: Any) -> None:
    config = KVFlashConfig(pool=512, policy="lru", spec=SpecConfig(width=5, types=("ngram",)))
    llm = llama(kvflash=config)
    again = pickle.loads(pickle.dumps(llm))
    assert inside(again).config == config
    assert again.kvflash.spec.types == ("ngram",)
    prompt = np.tile(tokens[:60], 3).tolist()
    assert [*islice(again.generate(prompt, temp=0.0), 20)] == [*islice(llm.generate(prompt, temp=0.0), 20)]
    assert again.kvflash.spec.last == pickle.loads(pickle.dumps(again.kvflash.spec.last))
    again.close()


@pytest.mark.parametrize("settings", [{"temp": 0.0}, {"temp": 0.8}], ids=["greedy", "sampled"])
def test_a_model_that_is_closed_within_what_is_accepted(settings: Any, pair: Any) -> None:
    plain, llm, prompt = pair()
    llm.draft_model = Knowing([*prompt, *islice(plain.generate(prompt, **settings), 20)])
    stream = llm.generate(prompt, **settings)
    assert len(list(islice(stream, 4))) == 4
    assert inside(llm).session.ahead
    asked: list[int] = []
    llm.draft_model.__dict__["text"] = Noting(asked)
    llm.close()
    with pytest.raises(KVFlashError, match="closed"):
        next(stream)
    assert not asked, "what drafts is closed, too"


class Noting(list[int]):
    def __init__(self, asked: list[int]) -> None:
        self.asked = asked

    def __getitem__(self, where: Any) -> Any:
        self.asked.append(where.start)
        return []


def test_a_length_that_is_set_within_what_is_accepted(pair: Any) -> None:
    def told(one: Any) -> list[int]:
        answer = []
        for at, token in enumerate(islice(one.generate(prompt, temp=0.0), 12)):
            answer.append(token)
            if at == 4:
                one.n_tokens -= 2
        return answer

    plain, llm, prompt = pair()
    assert told(llm) == told(plain)
    assert llm.kvflash.spec.last.accepted > 0
    assert inside(llm).session.tokens.tolist() == inside(plain).session.tokens.tolist()


def test_what_has_failed_is_not_asked_again_with_another_draft_model(
    llama: Any, models: Any, tokens: Any, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    spec = SpecConfig(types=("ngram", "draft-eagle3"), draft=models["eagle3"], width=4)
    llm = llama(**(STRICT | {"n_ubatch": 256}), kvflash_spec=spec)
    prompt = tokens[300:420].tolist()
    eagle3 = inside(llm).drafting.drafters[1]

    def fail(*_: Any) -> None:
        raise RuntimeError("it has failed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eagle3, "propose", fail)
        list(islice(llm.generate(prompt, temp=0.9), 20))
    assert llm.kvflash.spec.types == ("ngram",)
    total = llm.kvflash.spec.total
    assert total.plain_steps + total.steps > 5
    llm.draft_model = Knowing([])
    assert llm.kvflash.spec.types == ("draft_model", "ngram")
    assert llm.kvflash.spec.total == total, "which goes on"
    list(islice(llm.generate(prompt, temp=0.9), 20))


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_batch_that_has_no_room_for_drafts(kind: str, llama: Any, tokens: Any) -> None:
    llm = llama(kind, **(STRICT | {"n_batch": 1}), kvflash_spec=SpecConfig(types=("ngram",)))
    assert len(list(islice(llm.generate(tokens[:20].tolist(), temp=0.0), 10))) == 10
    assert llm.kvflash.spec.last.plain_steps == 9


@pytest.mark.parametrize("on", ["class", "object"])
def test_a_sample_of_ones_own_is_asked_for_each_token(on: str, pair: Any) -> None:
    _, llm, prompt = pair()
    inherited, asked = type(llm).sample, list[int]()

    def sample(self: Any, *args: Any, **kwargs: Any) -> int:
        asked.append(inherited(self, *args, **kwargs))
        return asked[-1]

    if on == "class":
        llm.__class__ = type("Own", (type(llm),), {"sample": sample})
    else:
        llm.sample = sample.__get__(llm)
    assert list(islice(llm.generate(prompt, temp=0.0), 30)) == asked
    assert llm.kvflash.spec.last.accepted > 0


def test_an_automatic_pool_leaves_room_for_what_drafts(models: Any) -> None:
    from kvflash_ggml.drafter.model import COMPUTE_BYTES
    from kvflash_ggml.llama.drafting import device_bytes
    from kvflash_ggml.speculation.find import EAGLE3, MTP, NGRAM, Found

    file = models["eagle3"]
    assert device_bytes([Found(NGRAM)]) == 0
    assert device_bytes([Found(NGRAM), Found(MTP)]) == COMPUTE_BYTES
    assert device_bytes([Found(EAGLE3, file)]) == COMPUTE_BYTES + file.stat().st_size


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({}, "give kvflash a pool size"),
        ({"kvflash": "off"}, "give kvflash a pool size"),
        ({"kvflash": 512, "kvflash_spec": "auto"}, "kvflash_spec=SpecConfig"),
        ({"kvflash": KVFlashConfig(pool=512)}, "a KVFlashConfig: name the file there"),
    ],
    ids=["none", "off", "spec", "config"],
)
def test_draft_model_names_a_file_where_that_can_be(keywords: dict[str, Any], told: str, loaded: None) -> None:
    from kvflash_ggml.llama import parameters

    with pytest.raises(ConfigError, match=r"draft_model='d\.gguf'") as caught:
        parameters.read({"draft_model": "d.gguf", **keywords}, {})
    assert told in str(caught.value)


def test_draft_model_as_a_file(loaded: None) -> None:
    from kvflash_ggml.llama import parameters

    request = parameters.read({"draft_model": "d.gguf", "kvflash": 512}, {})
    assert request.config == KVFlashConfig(pool=512, spec=SpecConfig(draft=Path("d.gguf")))
    assert "draft_model" not in request.upstream
