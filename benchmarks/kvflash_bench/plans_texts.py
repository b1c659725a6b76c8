"""The plans of what is found in texts, of conversations and of servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from . import plot as plots
from .forms import SETS
from .opening import reads_exactly
from .options import Bytes, Factors, Fractions, Names, Number, Numbers, Shares
from .plans import COUNT, DEPTHS, DOCUMENTS, FULL, POLICIES, PREVIEWS, OfText, file
from .tasks_longbench import read
from .tasks_ruler import TASKS as RULER
from .tasks_ruler import WHOLE
from .verb import Plan, option

ANSWERS = ("pool", "exact", "lossless", "auto")
"""Of `recall` and `ruler`."""

WIDTH = "Rows of each step that verifies drafts.  [default: as many as pay]"

# --- relevance


@dataclass(frozen=True, kw_only=True)
class Asked(OfText):
    """A plan that asks about facts in documents. depths: 0 to 1."""

    contexts: tuple[int, ...] = option("8K", DOCUMENTS, type=Numbers())
    fact_set: str = option(
        "choose",
        "Facts and documents of forms: choose settings on one set, confirm them on the other.",
        names=("--set",),
        type=click.Choice(list(SETS)),
    )
    depths: tuple[float, ...] = option("10,50,90", DEPTHS, type=Fractions())
    seed: int = option(0)


@dataclass(frozen=True, kw_only=True)
class Recall(Asked):
    """Questions about a long text that are answered right: the full cache, and policies in pools."""

    residency: tuple[float, ...] | None = option(
        None, "Pools, in % of the context.  [default: 6.25,3 without --pools]", type=Shares()
    )
    pools: tuple[int, ...] = option((), "Pools, in tokens.", type=Numbers())
    policies: tuple[str, ...] = option("qk:exact,qk,lru", POLICIES + PREVIEWS, type=Names())
    full: bool = option(True, FULL)
    tasks: tuple[str, ...] = option(
        "single,multikey4",
        "Of single, multikey4, multivalue, vartrack, jsonkv, words, reworded, chat; for models that were not trained "
        "to recall: forms (twelve facts in a document, asked verbatim and reworded in the model's chat template) and "
        "late (the same, after some eighty other tokens of the answer), turning (one answer that turns to seven facts) "
        "and listing (that lists seven), and whole (count, list and compare facts from all over a document).",
        type=Names(),
    )
    trials: int = option(16, "Of each task; a trial asks once at every depth.")
    answer: str = option("pool", "What answers of pools see.", type=click.Choice(ANSWERS))
    width: int | None = option(None, WIDTH, type=COUNT)
    drafter: Path | None = option(
        None, "Small model for the policy of that name, and for previews.", type=file(exists=True)
    )
    plot: Path | None = option(None, "Draw recall against residency (PNG).", type=file())

    def check(self) -> None:
        super().check()
        if self.answer != "pool" and not all(map(reads_exactly, self.policies)):
            raise click.BadParameter(f"{self.answer!r} needs policies with ':exact' alone", param_hint="--answer")
        if self.plot is not None:
            plots.check()


@dataclass(frozen=True, kw_only=True)
class Graded(Plan):
    """A plan of samples that every arm answers. contexts: tokens of a prompt with its answer."""

    contexts: tuple[int, ...] = option("4K", "Tokens of each prompt with its answer.", type=Numbers())
    residency: tuple[float, ...] | None = option(
        None, "Pools, in % of the context.  [default: 6.25,3 without --pools]", type=Shares()
    )
    pools: tuple[int, ...] = option((), "Pools, in tokens.", type=Numbers())
    policies: tuple[str, ...] = option("qk:exact", POLICIES, type=Names())
    answers: tuple[str, ...] = option(
        "pool",
        "What answers see: pool, or exact, lossless and auto, which see the whole text where a policy reads exactly.",
        type=Names(),
    )
    drafts: tuple[str, ...] = option(
        "", "Also with each of these drafters: names as --kvflash-spec takes them.", type=Names()
    )
    width: int | None = option(None, WIDTH, type=COUNT)
    full: bool = option(True, FULL)
    out: Path | None = option(None, "Keep finished samples in this file, and go on from what it has.", type=file())

    def check(self) -> None:
        super().check()
        if unknown := set(self.answers) - set(ANSWERS):
            raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(ANSWERS)}", param_hint="--answers")


@dataclass(frozen=True, kw_only=True)
class Ruler(Graded, OfText):
    """RULER's thirteen tasks, made of real text: the full cache, and pools. Every arm has the same questions.

    A table has a column for each task, another one the averages by length beside published ones. What is finished can
    be kept in a file, from which the same command goes on after Ctrl-C.
    """

    tasks: tuple[str, ...] = option(
        ",".join(RULER), "Of RULER. cwe and fwe need all of the text at once.", type=Names(), show_default=False
    )
    samples: int = option(8, "Of each task at each length.", type=COUNT)
    seed: int = option(0)
    plot: Path | None = option(None, "Draw the averages by length (PNG).", type=file())

    def check(self) -> None:
        super().check()
        if unknown := set(self.tasks) - set(RULER):
            raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(RULER)}", param_hint="--tasks")
        if self.plot is not None:
            plots.check()


@dataclass(frozen=True, kw_only=True)
class Explain(OfText):
    """Tell of one sample of RULER where its answers stand, and whether the pool had them when they were needed.

    The full cache and the pool answer it. A row has a chunk of an answer: its rank among all chunks, its share of
    attention and whether it was resident, at the prompt's end and at the token of the reply that needed it. A second
    table has the chunks that the pool had at the prompt's end instead, with their shares and first words.
    """

    context: int = option("4K", "Tokens of the prompt with its answer.", type=Number())
    pool: int = option("1K", "Tokens.", type=Number("one pool"))
    policy: str = option("qk:exact", POLICIES)
    tau: int | None = option(
        None, "Tokens between two reselections; beside a GPU it is 64 by default.  [default: the policy's]", type=COUNT
    )
    task: str = option("niah_multikey_1", "Of RULER, but for cwe and fwe.")
    index: int = option(0, "Of the sample.")
    seed: int = option(0)

    def check(self) -> None:
        super().check()
        if self.task not in RULER or self.task in WHOLE:
            names = ", ".join(name for name in RULER if name not in WHOLE)
            raise click.BadParameter(f"{self.task!r} is none of {names}", param_hint="--task")


@dataclass(frozen=True, kw_only=True)
class LongBench(Graded):
    """LongBench, from its own files: the full cache, and pools. Every arm has the same questions.

    Of a prompt that is longer than the context the middle is left out. What is finished can be kept in a file, from
    which the same command goes on after Ctrl-C.
    """

    data: Path = option(
        None,
        "Folder with LongBench's files, such as hotpotqa.jsonl.",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        required=True,
    )
    contexts: tuple[int, ...] = option("8K", "Tokens of each prompt with its answer.", type=Numbers())
    tasks: tuple[str, ...] = option("", "Names of files without .jsonl.  [default: all that are there]", type=Names())
    samples: int | None = option(None, "Of each file, from its beginning.  [default: all]", type=COUNT)

    def check(self) -> None:
        super().check()
        read(self.data, self.tasks, self.samples)


@dataclass(frozen=True, kw_only=True)
class Scores(Asked):
    """How high each score ranks the chunk of the answer, all on the same queries and keys of texts read under lru."""

    residency: float = option(6.25, "Pool, in % of the context.")
    tasks: tuple[str, ...] = option("single,multikey4", type=Names())
    trials: int = option(4, "Of each task; a trial asks once at every depth.")


@dataclass(frozen=True, kw_only=True)
class Faults(Asked):
    """At which tokens of an answer the retrieval heads ask for a chunk: how surely that tells where a value is."""

    contexts: tuple[int, ...] = option("4K", DOCUMENTS, type=Numbers())
    pools: tuple[int, ...] = option("512,1K", "Simulated pools, in tokens.", type=Numbers())
    tasks: tuple[str, ...] = option("turning,listing", "See recall.", type=Names())
    thresholds: tuple[float, ...] = option("5,10,20,30,50", "Shares of a head, in %.", type=Fractions())
    trials: int = option(1, "Of each task, and documents of plain text.", type=COUNT)
    tokens: int = option(200, "Of plain text after a document.", type=COUNT)


@dataclass(frozen=True, kw_only=True)
class Doubts(OfText):
    """Which signal of an answer tells that the pool has lost a value that the full cache finds."""

    contexts: tuple[int, ...] = option("4K", DOCUMENTS, type=Numbers())
    pools: tuple[int, ...] = option("512,1K", "Pools, in tokens.", type=Numbers())
    tasks: tuple[str, ...] = option("turning,listing,forms,whole", "See recall.", type=Names())
    taus: tuple[int, ...] = option("0,64", "Tokens between two reselections; 0 for the default.", type=Numbers())
    trials: int = option(1, "Of each task and set.", type=COUNT)
    seed: int = option(0)


@dataclass(frozen=True, kw_only=True)
class Reading(OfText):
    """Loss of what a document repeats while it is read: with reselection meanwhile, and at the prompt's end only."""

    contexts: tuple[int, ...] = option("8K", DOCUMENTS, type=Numbers())
    residency: tuple[float, ...] = option("6.25", "Pools, in % of the context.", type=Shares())
    policies: tuple[str, ...] = option("qk:exact,qk,lru", POLICIES, type=Names())
    full: bool = option(True, FULL)
    tasks: tuple[str, ...] = option("copy,table,scattered", type=Names())
    trials: int = option(8, "Of each task.")
    seed: int = option(0)


@dataclass(frozen=True, kw_only=True)
class Loss(OfText):
    """Loss of the tokens that follow a real text, and how often the likeliest one is that of the full cache."""

    contexts: tuple[int, ...] = option("4K", DOCUMENTS, type=Numbers())
    pools: tuple[int, ...] = option("512", "Pools, in tokens.", type=Numbers())
    policies: tuple[str, ...] = option("qk:exact,qk,lru", POLICIES, type=Names())
    documents: int = option(4, type=COUNT)
    tokens: int = option(200, "Counted after a document.", type=COUNT)
    seed: int = option(0, "Of the first document.")


# --- conversations and servers


@dataclass(frozen=True, kw_only=True)
class OnePool(OfText):
    """A plan of texts that share one pool."""

    pool: int = option("1K", "Slots of the pool.", type=Number())


@dataclass(frozen=True, kw_only=True)
class Talking(OnePool):
    """A plan of conversations without the network."""

    tau: int = option(16, "Fixed, so that nothing depends on the clock.")
    reading: str = option(
        "auto",
        "What tokens of a prompt see: all of the text, or what the pool holds.",
        type=click.Choice(("auto", "exact", "pool")),
    )


@dataclass(frozen=True, kw_only=True)
class Conversations(Talking):
    """Many conversations take turns at random on one pool; is each answer that of a lone run?"""

    count: int = option(32, "Conversations.")
    length: int = option("8K", "Tokens of each one's first prompt.", type=Number())
    turns: int = option(3)
    parallel: int = option(
        1,
        "Seats, each with an equal part of the pool. A lone run has such a part.",
        names=("-np", "--parallel"),
        type=COUNT,
    )
    question: int = option(64, "Tokens of each later prompt that are new.")
    answer: int = option(16, "Tokens of each answer.")
    compared: int | None = option(
        None, "How many are compared with a lone run.  [default: all]", names=("--check",), type=int
    )
    beside: int = option(
        0, "Processes that make lone runs meanwhile; 0: one makes them afterwards, and disturbs no times."
    )
    seconds: float | None = option(None, "What has been done by then is reported.  [default: all is done]", type=float)
    park_memory: int = option("1G", "Beyond, they go to a folder.", type=Bytes())
    host_limit: int | None = option(None, "Of page images in memory; beyond, they go to a spill file.", type=Bytes())
    servers: int = option(0, "Servers that share a store, each in a process; a turn goes to any of them. 0: none.")
    store_bandwidth: int = option(
        0, "Bytes per second to and from the store; 0: as many as there can be.", type=Bytes()
    )
    kill_every: int = option(0, "Turns after which one of them is killed, and another one starts; 0: never.")
    end_every: int = option(0, "Turns after which one of them is told to end, and another one starts; 0: never.")
    seed: int = option(1)


@dataclass(frozen=True, kw_only=True)
class Agent(Talking):
    """An agent's transcript, turn by turn: time to the first token, beside reading all of it again."""

    system: int = option("8K", "Tokens of the system prompt.", type=Number())
    turns: int = option(40)
    result: int = option(400, "Tokens of a tool's result.")
    answer: int = option(32, "Tokens of an answer.")
    side_every: int = option(5, "A short request of its own after so many turns; 0: none.")
    reread_every: int = option(8, "Turns whose whole prompt a stock cache reads; 0: none.")
    interfaces: tuple[str, ...] = option(
        "", "Replay it through these of a server instead: chat, messages, responses.", type=Names()
    )
    kill_before: int = option(
        0, "Kill the server before this turn, counted from 1; another one goes on from its --store. 0: never."
    )


@dataclass(frozen=True, kw_only=True)
class Replay(OfText):
    """Sessions of coding agents, by several users at once, with as many bytes of KV cache for our server and stock's.

    Each user plays a session, turn by turn, with the times that tools take in between. A row has the requests that were
    answered, and the time to the first token. Sessions come from files in the schema abench-session-jsonl-v1 of
    agentic-bench, or are made of real text with the lengths and times of public traces.
    """

    sessions: tuple[Path, ...] = option(
        (), "Files of sessions, one JSON object a line.  [default: made]", type=file(exists=True), multiple=True
    )
    users: tuple[int, ...] = option("1,2,4,8", "At once, each with a session.", type=Numbers())
    kv: int = option("2G", "Bytes for the KV cache, of ours with its layer buffers.", type=Bytes())
    host: int = option("8G", "Bytes of host memory for idle sessions, of either server.", type=Bytes())
    start: int = option("20K", "Of made sessions: tokens of the first prompt.", type=Number())
    end: int = option("115K", "Of made sessions: tokens of the last prompt, at most.", type=Number())
    known: float = option(
        97.0, "Of made sessions: how much of a later prompt is known, in %.", type=click.FloatRange(1, 99.9)
    )
    answer: int = option(64, "Of made sessions: tokens of an answer.", type=COUNT)
    gaps: float = option(1.0, "Factor of the times that tools take.", type=click.FloatRange(min=0))
    seconds: float = option(3600.0, "For each number of users: nothing is asked later.")
    stock: Path | None = option(
        None,
        "Folder of upstream's programs: scripts/vendor.py stock builds them.  [default: ours only]",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
    )
    serve: str = option("", "More options of our server, as one word: '--pool-share strict'.")
    write: Path | None = option(None, "Write the made sessions to this file.", type=file())
    plot: Path | None = option(None, "Draw the time to the first token by users (PNG).", type=file())
    seed: int = option(0)


@dataclass(frozen=True, kw_only=True)
class Server(OnePool):
    """How fast is an answer through the server, beside the bare Llama?"""

    context: int = option("1K", "Tokens of the prompt.", type=Number())
    answer: int = option(256, "Tokens of the answer.")
    repeats: int = option(3)


@dataclass(frozen=True, kw_only=True)
class UnderLoad(OnePool):
    """A plan of many clients of one server."""

    clients: int = option(8, "That ask at once.")
    parallel: int = option(1, "Answers that the server computes together.", names=("-np", "--parallel"), type=COUNT)
    seed: int = option(1)


@dataclass(frozen=True, kw_only=True)
class Soak(UnderLoad):
    """Does a server grow? Many short requests over many conversations, some of whose clients leave."""

    requests: int = option(10_000)
    conversations: int = option(200)
    length: int = option("1K", "Tokens at which one begins again.", type=Number())
    park_memory: str = option("64M", "Of the server; beyond, they go to a folder.")


@dataclass(frozen=True, kw_only=True)
class Overload(UnderLoad):
    """Is anybody lost where as much is asked as can be answered, or more? And do clients, log and metrics agree?

    Requests come at random; refused clients come again when they are told to, and one of ten leaves at some moment.
    """

    times: tuple[float, ...] = option("3", "As many as it answers; several, one after the other.", type=Factors())
    seconds: float = option(60.0, "For each of them.")
    lengths: tuple[int, ...] = option("200,4K", "Of prompts: least and most.", type=Numbers())
    max_queue: int = option(16, "Of the server.")
    deadline: float = option(3600.0, "Seconds that the server has for a request.")
    patience: float = option(300.0, "Seconds after which a refused client gives up.")

    def check(self) -> None:
        super().check()
        if len(self.lengths) != 2:
            raise click.BadParameter("give the least and the most", param_hint="--lengths")


# --- several sequences

QUESTIONS = ("decode", "clients", "outgrow", "gap", "recall", "latency", "agents", "long", "draw")
"""Of `seats`."""


@dataclass(frozen=True, kw_only=True)
class Seats(OfText):
    """Several sequences on one pool, beside upstream's own programs in the same run.

    decode: tokens a second of all sequences, in steps of one row each. clients: how much sooner clients have their
    answers that ask at once. outgrow: do chats finish that outgrow the pool together? gap: how long answers stand still
    while another prompt is read. recall: what is answered right by sequences together, and by each alone. latency: one
    client's answers by servers of one sequence and of several, in turns. agents: sessions with tools, of as many users
    at once, and one after the other. long: tokens a second of long texts, on a pool and whole. draw: what it takes to
    draw one token from its logits.
    """

    questions: tuple[str, ...] = option("decode,clients,outgrow", f"Of {', '.join(QUESTIONS)}.", type=Names())
    stock: Path | None = option(
        None,
        "Folder of upstream's programs: scripts/vendor.py stock builds them.  [default: ours only]",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
    )
    batches: tuple[int, ...] = option(
        "1,2,4,8,16,32", "Sequences of decode, recall, latency and long, or users of agents.", type=Numbers()
    )
    length: int = option("1K", "Tokens of each of these sequences, or of its document.", type=Number())
    lengths: tuple[int, ...] = option(
        (),
        "Of documents of unequal length, in turns, instead of --length; of long, one after the other.",
        type=Numbers(),
    )
    share: int = option("1K", "Of the pool, for each of them.", type=Number())
    pool: int | None = option(
        None, "Of decode: tokens of the pool in all, or of stock's cache, instead of --share.", type=Number()
    )
    steps: int = option(64, "Decode steps that are timed. Of draw: rows.", type=COUNT)
    serve: str = option("", "More options of our server, as one word: '--pool-share strict'.")
    clients: int = option(16, "Of clients.", type=COUNT)
    prompt: int = option("64", "Tokens of each client's prompt.", type=Number())
    answer: int = option("128", "Tokens of each client's answer.", type=Number())
    chats: int = option(4, "Of outgrow.", type=COUNT)
    cells: int = option(
        "8K", "Tokens of the pool, or of stock's cache. A chat of outgrow has 46 % of them in the end.", type=Number()
    )
    streams: int = option(7, "Answers of gap that stream.", type=COUNT)
    long: int = option("8K", "Tokens of the prompt that is read meanwhile.", type=Number())
    trials: int = option(16, "Documents of recall.", type=COUNT)
    task: str = option("single", "Of recall and agents: a task of the verb recall.")
    asks: int = option(24, "Questions that recall asks about a document, at most.", type=COUNT)
    rules: tuple[str, ...] = option("strict", "Of recall: strict, elastic, as of --pool-share.", type=Names())
    turns: int = option(10, "Results of tools in a session of agents, each of 3 % of its document.", type=COUNT)
    repeats: int = option(3, "Runs of each, ours and stock's in turns; medians are reported.", type=COUNT)
    seed: int = option(0)

    def check(self) -> None:
        super().check()
        if unknown := set(self.questions) - set(QUESTIONS):
            raise click.BadParameter(f"{min(unknown)!r} is none of {', '.join(QUESTIONS)}", param_hint="--questions")
        if unknown := set(self.rules) - {"strict", "elastic"}:
            raise click.BadParameter(f"{min(unknown)!r} is none of strict, elastic", param_hint="--rules")
        if self.steps + 16 > self.length:
            raise click.BadParameter(f"{self.length} are no room for {self.steps} steps", param_hint="--length")
