"""What README, CONTRIBUTING and docs/ say: links lead somewhere, commands parse, examples do what is said of them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from support import golden_names
from support.fake_engine import FakeEngine, make_session

import kvflash_bench as bench
from kvflash_ggml import cli
from kvflash_ggml.cli.convert import convert as converting
from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.llama.keywords import PoolKeywords
from kvflash_ggml.policy.base import Scorer
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.settings import settings

REPO = Path(__file__).parents[2]
FOLDERS = (
    "",
    "docs",
    "benchmarks",
    "router",
    "fleet",
    "patches",
    "vendor",
    "tests/models",
    "tests/golden",
    "tests/text",
    "scripts/train_recall",
    "scripts/train_draft",
)
PAGES = [page for folder in FOLDERS for page in sorted((REPO / folder).glob("*.md"))]
UNMEASURED = {
    "CHANGELOG.md": "a list",
    "docs/map.md": "written by scripts/map",
    "docs/architectures.md": "written by scripts/arch_table.py",
}
"""Pages whose sentences may be long, and why."""
LONGEST, MEAN = 30, 16
"""Words of a sentence. Code and a link count as one word each."""

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(REPO))


def text_of(name: str) -> str:
    return (REPO / name).read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# --- pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_readme_stays_short() -> None:
    assert len(text_of("README.md").splitlines()) <= 120


def test_the_benchmarks_stay_short() -> None:
    assert len(text_of("docs/benchmarks.md").splitlines()) <= 300


@pytest.mark.parametrize(
    "word", ["prefill", "prompt processing", "swap", "slot", "speculative decoding", "VRAM", "YaRN"]
)
def test_a_word_that_people_search_for_is_there(word: str) -> None:
    pages = [text_of("README.md"), *(page.read_text(encoding="utf-8") for page in (REPO / "docs").glob("*.md"))]
    assert sum(word in page for page in pages) >= 2


def test_the_map_is_current() -> None:
    found = subprocess.run([sys.executable, str(REPO / "scripts/map")], capture_output=True, text=True, check=True)
    assert text_of("docs/map.md") == found.stdout, "run scripts/map > docs/map.md"
    assert [line for line in found.stdout.splitlines() if line.endswith("|  |")] == []


def test_the_api_page_has_every_variable() -> None:
    text = text_of("docs/api.md")
    assert [name for name in golden_names.variables() if f"`{name}`" not in text] == []


def test_every_member_of_the_api_page_says_what_it_is() -> None:
    rows = re.findall(r"^\| (`.*?`) \|(.*) \|$", text_of("docs/api.md"), re.MULTILINE)
    assert len(rows) > 100
    assert [name for name, text in rows if not text.strip()] == []


def test_the_readme_has_the_memory_that_the_package_computes() -> None:
    rows = re.findall(r"^\| (?:Llama|Qwen|Gemma).*$", text_of("README.md"), re.MULTILINE)
    assert len(rows) == 3
    assert [row for row in rows if row not in text_of("docs/memory.md").splitlines()] == []


def test_the_readme_counts_architectures_as_their_page_does() -> None:
    readme, page = " ".join(text_of("README.md").split()), " ".join(text_of("docs/architectures.md").split())
    match = re.search(r"(\d+) models run in a pool, (\d+) are refused with the reason below.* (\d+) cannot run", page)
    assert match is not None
    pooled, refused, broken = map(int, match.groups())
    assert f"{pooled} of the {pooled + refused + broken} models" in readme
    match = re.search(r"run in a pool, and (\d+) are refused\.", page)
    assert match is not None
    assert f"{match[1]} architectures are refused" in readme


def test_the_index_names_every_page() -> None:
    index = text_of("docs/README.md")
    assert [page.name for page in (REPO / "docs").glob("*.md") if f"({page.name})" not in index] == ["README.md"]


def test_the_readme_explains_every_keyword() -> None:
    cells = re.findall(r"^\| (`kvflash.*?) \|", text_of("README.md"), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(PoolKeywords.__annotations__)


def test_the_readme_has_the_defaults() -> None:
    rows = re.findall(r"^\| (`kvflash_.*?) \| (.*?) \|", text_of("README.md"), re.MULTILINE)
    told = {
        name: ast.literal_eval(value)
        for names, values in rows
        for name, value in zip(re.findall(r"`kvflash_(\w+)`", names), re.findall(r"`(.*?)`", values), strict=True)
    }
    usual = KVFlashConfig()
    assert {name: told[name] for name in settings(KVFlashConfig)} == {
        name: getattr(usual, name) for name in settings(KVFlashConfig)
    }


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/policies.md"])
def test_tables_have_one_number_a_cell(name: str) -> None:
    rows = [line for line in text_of(name).splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.split("|")]
    assert [cell for cell in cells if re.search(r"\d\)? / [\d(]", cell)] == []


def test_contributing_names_what_the_tests_read() -> None:
    text = text_of("CONTRIBUTING.md")
    sources = "".join(path.read_text(encoding="utf-8") for path in (REPO / "tests").rglob("*.py"))
    names = {*re.findall(r"KVFLASH_TEST_\w+", sources), *re.findall(r'register_profile\(\s*"(\w+-\w+)"', sources)}
    assert len(names) == 4
    assert [name for name in names if name not in text] == []


def test_paths_that_contributing_names_are_there() -> None:
    paths = re.findall(r"[\w./]*\w/[\w.]+\w", re.sub(r"\]\([^)]*\)|https:\S+", "", text_of("CONTRIBUTING.md")))
    paths = [path for path in paths if not path.startswith(".venv")]
    assert len(paths) > 15
    assert [path for path in paths if not (REPO / path).exists()] == []


def test_files_that_the_architecture_names_are_there() -> None:
    names = re.findall(r"`([\w./]+(?:/|\.py|\.cpp|\.h))`", text_of("ARCHITECTURE.md"))
    folders = (REPO / "kvflash_ggml", REPO, REPO / "kvflash_ggml" / "native")
    assert len(names) > 40
    assert [name for name in names if not any((folder / name).exists() for folder in folders)] == []


def test_the_architecture_stays_short() -> None:
    assert len(text_of("ARCHITECTURE.md").splitlines()) <= 220


def test_the_architecture_names_every_patch() -> None:
    text = text_of("ARCHITECTURE.md")
    assert [path.stem for path in (REPO / "patches").glob("*.patch") if f"`{path.stem}`" not in text] == []


def test_the_hooks_fetch_nothing() -> None:
    hooks = text_of(".pre-commit-config.yaml")
    assert re.findall(r"repo: (\S+)", hooks) == ["local"]
    entries = re.findall(r"entry: (\S+)", hooks)
    assert len(entries) == 4
    assert [entry for entry in entries if not entry.startswith(".venv/bin/")] == []


# --- sentences


def sentences(text: str) -> list[list[str]]:
    """The words of each sentence of a page, without its headings, tables and blocks of code."""
    text = re.sub(r"^ {4}\S.*$", "", BLOCK.sub("\n", text), flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text)).replace("**", "")
    paragraphs = [""]
    for line in text.splitlines():
        if not line.strip() or line.startswith(("|", "#")):
            paragraphs.append("")
        elif match := re.match(r"\s*(?:[-*]|\d+\.) (.*)", line):
            paragraphs.append(match[1])
        else:
            paragraphs[-1] += f" {line}"
    found = [words.split() for paragraph in paragraphs for words in re.split(r"(?<=[.!?])[\"')]*\s+", paragraph)]
    return [words for words in found if words]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if name_of(page.parent) in (".", "docs", "router", "fleet")], ids=name_of
)
def test_sentences_are_short(page: Path) -> None:
    found = sentences(page.read_text(encoding="utf-8"))
    if name_of(page) not in UNMEASURED:
        assert [" ".join(words) for words in found if len(words) > LONGEST] == []
        assert sum(map(len, found)) / len(found) <= MEAN


def test_a_sentence_ends_at_its_full_stop_and_a_table_is_none() -> None:
    text = "# A head\n\nOne `a b c` [two words](x.md#y).\nThen\nthree.\n\n| a | b |\n\n- A point of four\n"
    assert [len(words) for words in sentences(text)] == [4, 2, 4]


def test_pages_of_which_no_length_is_asked_are_there() -> None:
    assert [name for name in UNMEASURED if not (REPO / name).exists()] == []


# --- commands


def commands(program: str) -> list[Any]:
    found = []
    for page in PAGES:
        for line in "\n".join(blocks(page, "sh")).splitlines():
            words = shlex.split(line, comments=True)
            if program in words:
                words = words[words.index(program) + 1 :]
                found.append(pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}"))
    return found


def parse(group: click.Command, words: list[str]) -> None:
    """UsageError for an option that is not there, one without its value, or with one that it does not take."""
    command = group
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)] if words[0] in command.commands else command.commands["run"]
    command.parse_args(click.Context(command, **command.context_settings), words)


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the path of any file: the pages name files that are not here."""
    for kind in (click.Path, click.File):
        monkeypatch.setattr(kind, "convert", lambda self, value, param, ctx: value)


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("words", commands("kvflash-run"))
def test_commands_can_be_typed(words: list[str]) -> None:
    parse(cli.main, words)


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("words", commands("kvflash-bench"))
def test_benchmarks_can_be_typed(words: list[str]) -> None:
    parse(bench.main, words)


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("words", commands("kvflash-convert"))
def test_conversions_can_be_typed(words: list[str]) -> None:
    parse(converting, words)


def test_options_of_ours_that_the_page_of_options_names_are_there() -> None:
    rows = [line.split("|") for line in text_of("docs/options.md").splitlines() if line.startswith("| ")]
    named = {span.split()[0] for row in rows for span in re.findall(r"`(-[^`]*)`", row[2])}
    verbs = [cli.main.commands[name] for name in ("run", "serve")]
    known = {name for verb in verbs for param in verb.params for name in (*param.opts, *param.secondary_opts)}
    assert len(named) > 20
    assert sorted(named - known) == []


def test_a_command_that_cannot_be_typed_is_found() -> None:
    with pytest.raises(click.NoSuchOption):
        parse(cli.main, ["model.gguf", "--kv-flash", "4096"])


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("words", [["--pools", "many"], ["-ctk", "q9"], ["--samples", "0"]])
def test_a_value_that_an_option_does_not_take_is_found(words: list[str]) -> None:
    with pytest.raises(click.BadParameter):
        parse(bench.main, ["ruler", "model.gguf", *words])


# --- examples


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_are_python(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block, name_of(page), "exec")


@pytest.fixture
def example() -> Any:
    (block,) = (block for block in blocks(REPO / "docs/policies.md", "python") if "class SharedTokens" in block)
    names: dict[str, Any] = {}
    exec(compile(block, "docs/policies.md", "exec"), names)
    return names["SharedTokens"]()


def resident_after_question(scorer: Any) -> tuple[int, ...]:
    """30 chunks of common tokens, with rare ones in chunk 7 that the last tokens repeat; eight fit."""
    tokens = np.random.default_rng(0).integers(0, 50, 30 * CHUNK).astype(np.int32)
    tokens[7 * CHUNK + 20 : 7 * CHUNK + 24] = tokens[-8:-4] = (90, 91, 92, 93)
    session = make_session(
        FakeEngine(8 * CHUNK, CHUNK), KVFlashConfig(pool=8 * CHUNK), n_ctx=4096, n_batch=CHUNK, n_ubatch=CHUNK,
        scorer=scorer,
    )  # fmt: skip
    extend(session, tokens)
    resident = session.table.resident_chunks
    session.close()
    return resident


def test_the_policy_of_ones_own_finds_what_is_asked_for(example: Any) -> None:
    assert isinstance(example, Scorer)
    assert 7 not in resident_after_question(None)
    assert 7 in resident_after_question(example)


def test_its_scores_are_one_a_chunk(example: Any) -> None:
    for n_chunks in (0, 1, 5):
        tokens = np.arange(n_chunks * CHUNK + 3, dtype=np.int32)
        tokens[:2] -= 9  # rows of an image
        assert example.score(SimpleNamespace(tokens=tokens, n_chunks=n_chunks)).shape == (n_chunks,)
