"""LongBench's data sets (arXiv:2308.14508): how their files are read, asked and scored.

Names, fields of the files, lengths of answers and metrics are those of github.com/THUDM/LongBench (`config/`,
`pred.py`, `eval.py`, `metrics.py`). The prompts are in our words, so figures compare with each other, and roughly with
published ones.
"""

# ruff: noqa: RUF001 (Chinese punctuation)

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvflash_ggml.errors import ConfigError

Score = Callable[[str, str, Sequence[str]], float]
"""Of a reply, an answer and all classes: 0 to 1."""

ONE_LINE = ("trec", "triviaqa", "samsum", "lsht")
"""Data sets of whose replies only the first line counts."""

_MARKS = str.maketrans("", "", string.punctuation)
_CHINESE = "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～《》「」『』【】、…‘’“”—"
_MARKS_ZH = str.maketrans("", "", string.punctuation + _CHINESE)


# --- metrics


def qa_f1(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """F1 of the words, without case, punctuation and articles."""

    def words(text: str) -> list[str]:
        return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_MARKS)).split()

    return _f1(words(reply), words(answer))


def qa_f1_zh(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """F1 of the words that jieba finds, without case and punctuation."""

    def words(text: str) -> list[str]:
        found = (word.lower().translate(_MARKS_ZH).strip() for word in _cut(text))
        return [word for word in found if word]

    return _f1(words(reply), words(answer))


def _f1(said: Sequence[str], wanted: Sequence[str]) -> float:
    same = sum((Counter(said) & Counter(wanted)).values())
    return 2 * same / (len(said) + len(wanted)) if same else 0.0


def rouge_l(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """ROUGE-L of the package `rouge`: F1 of the different words in longest common subsequences of the sentences."""

    def sentences(text: str) -> list[list[str]]:
        return [" ".join(part.split()).split(" ") for part in text.split(".") if part]

    said, wanted = sentences(reply), sentences(answer)
    if not said or not wanted:
        return 0.0
    common = {word for one in wanted for other in said for word in _common(one, other)}
    recall, precision = (len(common) / len({word for one in some for word in one}) for some in (wanted, said))
    return 2 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """ROUGE-L of the words that jieba finds."""
    return rouge_l(" ".join(_cut(reply)), " ".join(_cut(answer)))


def _common(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """A longest common subsequence."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, word in enumerate(a, 1):
        for j, other in enumerate(b, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if word == other else max(table[i - 1][j], table[i][j - 1])
    found, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif table[i - 1][j] > table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _cut(text: str) -> list[str]:
    import jieba

    return list(jieba.cut(text, cut_all=False))


def classification(reply: str, answer: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the reply names, if the answer is one. Parts of the answer's name are none."""
    named = [one for one in classes if one in reply and (one == answer or one not in answer)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """Share of the numbers in a reply that are the number of the paragraph."""
    return count(reply, re.findall(r"\d+", answer)[0])


def count(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """Share of the numbers in a reply that are the answer."""
    numbers = re.findall(r"\d+", reply)
    return numbers.count(str(answer)) / len(numbers) if numbers else 0.0


def code_similarity(reply: str, answer: str, _classes: Sequence[str] = ()) -> float:
    """Likeness of the first line of code to the answer, in whole per cents as the package `fuzzywuzzy` tells it."""
    lines = reply.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100 if line and answer else 0.0


# --- data sets


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """How a data set is asked. prompt: with {context} and {input}. most: tokens of an answer.

    plain: continued as it stands, without the chat template, as LongBench has it for examples and code.
    """

    kind: str
    prompt: str
    most: int
    score: Score
    plain: bool = False


def _set(kind: str, score: Score, most: int, *prompt: str, plain: bool = False) -> DataSet:
    return DataSet(kind=kind, prompt="".join(prompt), most=most, score=score, plain=plain)


_BRIEF = "Answer the question by the text, with a few words and without an explanation."
_PASSAGES = f"{_BRIEF}\n\nPassages:\n{{context}}\n\n{_BRIEF}\n\nQuestion: {{input}}\nAnswer:"
_BRIEF_ZH = "请根据文章，用几个词直接回答问题，不要解释。"

DATA_SETS: dict[str, DataSet] = {
    "narrativeqa": _set(
        "single", qa_f1, 128, _BRIEF, "\n\nStory: {context}\n\n", _BRIEF, "\n\nQuestion: {input}\n\nAnswer:"
    ),
    "qasper": _set(
        "single", qa_f1, 128, _BRIEF,
        ' Write "unanswerable" if the article does not tell, and "yes" or "no" where that is the answer.\n\n',
        'Article: {context}\n\nQuestion: {input}\n("unanswerable" if the article does not tell)\n\nAnswer:',
    ),
    "multifieldqa_en": _set(
        "single", qa_f1, 64, _BRIEF, "\n\n{context}\n\n", _BRIEF, "\n\nQuestion: {input}\nAnswer:"
    ),
    "multifieldqa_zh": _set(
        "single", qa_f1_zh, 64, _BRIEF_ZH, "\n\n{context}\n\n", _BRIEF_ZH, "\n\n问题：{input}\n回答："
    ),
    "hotpotqa": _set("multi", qa_f1, 32, _PASSAGES),
    "2wikimqa": _set("multi", qa_f1, 32, _PASSAGES),
    "musique": _set("multi", qa_f1, 32, _PASSAGES),
    "dureader": _set("multi", rouge_l_zh, 128, "请根据文章回答问题。\n\n文章：{context}\n\n问题：{input}\n回答："),
    "gov_report": _set(
        "summary", rouge_l, 512, "Summarise this report on one page.\n\nReport:\n{context}\n\nSummary:"
    ),
    "qmsum": _set(
        "summary", rouge_l, 512, "Answer the request about a meeting in a few sentences.\n\n",
        "Transcript:\n{context}\n\nRequest: {input}\nAnswer:",
    ),
    "multi_news": _set("summary", rouge_l, 512, "Summarise these news on one page.\n\nNews:\n{context}\n\nSummary:"),
    "vcsum": _set("summary", rouge_l_zh, 512, "请总结下面这次会议的内容。\n\n会议记录：\n{context}\n\n会议总结："),
    "trec": _set(
        "examples", classification, 64, "Say of which type the last question is, as in the examples.\n\n",
        "{context}\n{input}", plain=True,
    ),
    "triviaqa": _set(
        "examples", qa_f1, 32, "Answer the last question by its passage, as in the examples.\n\n{context}\n\n{input}",
        plain=True,
    ),
    "samsum": _set(
        "examples", rouge_l, 128, "Summarise the last dialogue, as in the examples.\n\n{context}\n\n{input}", plain=True
    ),
    "lsht": _set(
        "examples", classification, 64, "请判断最后一条新闻的类别，下面是例子。\n\n{context}\n{input}", plain=True
    ),
    "passage_count": _set(
        "synthetic", count, 32, "Some of the paragraphs below stand there more than once. How many different ones are ",
        "there?\n\n{context}\n\nWrite the number of different paragraphs only.\n\nNumber: ",
    ),
    "passage_retrieval_en": _set(
        "synthetic", retrieval, 32, "Which of the paragraphs below does the abstract describe?\n\n{context}\n\n",
        'Abstract:\n\n{input}\n\nWrite the number of the paragraph only, as "Paragraph 1".\n\nAnswer: ',
    ),
    "passage_retrieval_zh": _set(
        "synthetic", retrieval, 32, "摘要出自下面哪一段？\n\n{context}\n\n摘要：\n\n{input}\n\n",
        "只回答段落的编号，例如“段落1”。\n\n答案：",
    ),
    "lcc": _set("code", code_similarity, 64, "Complete this code.\n{context}Next line of code:\n", plain=True),
    "repobench-p": _set(
        "code", code_similarity, 64, "Complete this code.\n{context}{input}Next line of code:\n", plain=True
    ),
}  # fmt: skip
"""LongBench's data sets. kind: the heading under which it averages them."""

CHINESE_WORDS = ("multifieldqa_zh", "dureader", "vcsum")
"""Data sets whose metrics need jieba."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One line of a file."""

    context: str
    input: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def name_of_set(task: str) -> str:
    """The data set of a file's name; those of LongBench-E end in "_e"."""
    return task.removesuffix("_e")


def read(folder: Path, names: Sequence[str], most: int | None) -> dict[str, list[Question]]:
    """Return the questions of the files of a folder, by the file's name. names: data sets, none for all.

    most: questions of each file. ConfigError where there are none, for a file that is none of LongBench, and without
    jieba for data sets that need it.
    """
    found = {path.stem: path for path in sorted(folder.glob("*.jsonl")) if name_of_set(path.stem) in DATA_SETS}
    names = names or tuple(found)
    if missing := set(names) - set(found):
        raise ConfigError(f"{folder} has no file of {min(missing)}: it has {', '.join(found) or 'none of LongBench'}")
    if not names:
        raise ConfigError(f"{folder} has no file of LongBench, such as hotpotqa.jsonl: name their folder with --data")
    if (words := [name for name in names if name_of_set(name) in CHINESE_WORDS]) and find_spec("jieba") is None:
        raise ConfigError(
            f"{words[0]} is scored by words that jieba finds: pip install jieba, or leave it out of --tasks"
        )
    return {name: _questions(found[name], most) for name in names}


def _questions(path: Path, most: int | None) -> list[Question]:
    out = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines()[:most]:
            one: dict[str, Any] = json.loads(line)
            out.append(
                Question(
                    context=one["context"], input=one["input"], answers=tuple(map(str, one["answers"])),
                    classes=tuple(one.get("all_classes") or ()),
                )
            )  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ConfigError(f"line {len(out) + 1} of {path} is none of LongBench: {type(err).__name__} {err}") from err
    return out


def score(name: str, reply: str, question: Question) -> float:
    """Return the best score of a reply by any answer, 0 to 1. name: of the data set."""
    if name in ONE_LINE:
        reply = reply.lstrip("\n").split("\n")[0]
    return max(DATA_SETS[name].score(reply, answer, question.classes) for answer in question.answers)
