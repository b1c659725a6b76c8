"""How the next token is chosen: llama.cpp's samplers, with llama-server's names and llama.cpp's defaults."""

from __future__ import annotations

from dataclasses import dataclass

from . import notation, settings
from .constants import MAX_CONTEXT
from .errors import ConfigError
from .settings import in_section

ORDER = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's order."""

KNOWN = (*ORDER, "infill", "adaptive_p")
"""Every sampler that an order can name. The last two are used only where named; `infill` is for gaps in code."""

BREAKERS = ("\n", ":", '"', "*")
"""llama.cpp's texts that end a sequence for DRY."""

MAX_BREAKERS, MAX_BREAKER = 32, 40
"""How many such texts, and bytes of one; llama.cpp cuts a longer one."""

_ALIASES = {"typical": "typ_p", "typical_p": "typ_p", "typ": "typ_p", "nucleus": "top_p", "temp": "temperature"}
_LETTERS = dict(zip("edskypmxtia", KNOWN, strict=True))

_field = in_section("Sampling")


def read_order(text: str) -> tuple[str, ...]:
    """Read names of samplers, as "top_k;temperature", or their letters, as "kt". ValueError for any other text."""
    words = [word.strip().lower().replace("-", "_") for word in text.split(";") if word.strip()]
    names = [_ALIASES.get(word, word) for word in words]
    if len(words) == 1 and names[0] not in KNOWN and set(words[0]) <= set(_LETTERS):
        names = [_LETTERS[letter] for letter in words[0]]
    _check_order(names)
    return tuple(names)


def read_breaker(text: str) -> str:
    """Read a text that ends a sequence, with \\n for the end of a line. ValueError for one that cannot."""
    written = text.replace("\\n", "\n").replace("\\t", "\t")
    check_breakers((written,))
    return written


def _check_order(names: list[str] | tuple[str, ...]) -> None:
    """Raise ValueError for a name that is no sampler's, and for more of them than there are."""
    unknown = [name for name in names if name not in KNOWN]
    if unknown:
        raise ValueError(f"{unknown[0][:40]!r} is no sampler: there are {';'.join(KNOWN)}")
    if len(set(names)) < len(names):
        raise ValueError(
            f"samplers names {';'.join(names)[:200]}, and each can be there once: leave out the repeated ones"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Samplers:
    """Settings of the samplers. ConfigError for a value that llama.cpp cannot use."""

    temperature: float = _field(
        float, "--temp", "--temperature", least=0, most=10, default=0.8, help="Temperature; 0 is greedy."
    )
    top_k: int = _field(int, least=-1, most=1 << 20, default=40, metavar="X", help="0: off.")
    top_p: float = _field(float, least=0, most=1, default=0.95, help="1: off.")
    min_p: float = _field(float, least=0, most=1, default=0.05, help="0: off.")
    typical_p: float = _field(
        float, "--typical", "--typical-p", least=0, most=1, default=1.0, help="Locally typical tokens; 1: off."
    )
    top_n_sigma: float = _field(
        float, "--top-nsigma", "--top-n-sigma", least=-1, most=100, default=-1.0,
        help="Keep tokens within so many standard deviations of the best logit; -1: off.",
    )  # fmt: skip
    dynatemp_range: float = _field(
        float, least=0, most=10, default=0.0, help="The temperature varies by so much around --temp; 0: off."
    )
    dynatemp_exponent: float = _field(
        float, "--dynatemp-exp", least=0, most=10, default=1.0, help="How entropy becomes temperature then."
    )
    xtc_probability: float = _field(
        float, least=0, most=1, default=0.0, help="How often XTC removes the likeliest tokens; 0: off."
    )
    xtc_threshold: float = _field(
        float, least=0, most=1, default=0.1, help="XTC removes tokens above this probability, but the last of them."
    )
    repeat_penalty: float = _field(float, least=0, above=True, most=10, default=1.0, help="1: off.")
    presence_penalty: float = _field(float, least=-2, most=2, default=0.0, help="0: off.")
    frequency_penalty: float = _field(float, least=-2, most=2, default=0.0, help="0: off.")
    repeat_last_n: int = _field(
        notation.tokens, least=-1, most=MAX_CONTEXT, default=64,
        help="Tokens that the three penalties look back at, the prompt's included; 0: off; -1: the whole context.",
    )  # fmt: skip
    dry_multiplier: float = _field(
        float, least=0, most=100, default=0.0, help="DRY: penalty for a token that goes on with a repetition; 0: off."
    )
    dry_base: float = _field(
        float, least=1, most=10, default=1.75, help="DRY: the penalty grows by this factor with each repeated token."
    )
    dry_allowed_length: int = _field(
        notation.tokens, least=0, most=MAX_CONTEXT, default=2, help="DRY: repetitions of so many tokens are free."
    )
    dry_penalty_last_n: int = _field(
        notation.tokens, least=-1, most=MAX_CONTEXT, default=64,
        help="DRY: tokens that it looks back at, the prompt's included; 0: off; -1: the whole context.",
    )  # fmt: skip
    dry_sequence_breakers: tuple[str, ...] = _field(
        read_breaker, "--dry-sequence-breaker", default=(), many=True, metavar="TEXT",
        help="DRY: a text that ends a repetition; may be repeated; none for no such text."
        "  [default: end of line, colon, quotation mark, asterisk]",
    )  # fmt: skip
    mirostat: int = _field(
        int, least=0, most=2, default=0, help="1 or 2: Mirostat of that version after --temp, instead of the others."
    )
    mirostat_tau: float = _field(
        float, "--mirostat-ent", least=0, most=100, default=5.0, help="Mirostat: the surprise it aims at, in bits."
    )
    mirostat_eta: float = _field(float, "--mirostat-lr", least=0, most=1, default=0.1, help="Mirostat: learning rate.")
    adaptive_target: float = _field(
        float, least=-1, most=1, default=-1.0,
        help="Adaptive-p, where --samplers names adaptive_p: choose tokens near this probability; below 0: off.",
    )  # fmt: skip
    adaptive_decay: float = _field(
        float, least=0, most=0.99, default=0.9, help="Adaptive-p: how much earlier tokens count; 0: not at all."
    )
    samplers: tuple[str, ...] = _field(
        read_order, "--samplers", "--sampler-seq", "--sampling-seq", default=ORDER, shown=False, metavar="NAME;...",
        help=f"The samplers that are used, in their order.  [default: {';'.join(ORDER)}]",
    )  # fmt: skip
    min_tokens: int = _field(
        notation.tokens, least=0, most=MAX_CONTEXT, default=0, help="The answer does not end before so many tokens."
    )

    def __post_init__(self) -> None:
        settings.check(self)
        try:
            _check_order(self.samplers)
            check_breakers(self.dry_sequence_breakers)
        except ValueError as err:
            raise ConfigError(str(err)) from None

    @property
    def breakers(self) -> tuple[str, ...]:
        """The texts that end a sequence for DRY."""
        return () if self.dry_sequence_breakers == ("none",) else self.dry_sequence_breakers or BREAKERS

    @property
    def keeps_likeliest(self) -> bool:
        """Whether the token with the highest logit is always chosen."""
        steady = (self.temperature, self.dynatemp_range, self.xtc_probability, self.mirostat) == (0, 0, 0, 0)
        whole = (self.typical_p, self.min_tokens) == (1, 0) and "temperature" in self.samplers
        free = (self.repeat_penalty, self.presence_penalty, self.frequency_penalty, self.dry_multiplier)
        return steady and whole and free == (1, 0, 0, 0)


def check_breakers(texts: tuple[str, ...]) -> None:
    """Raise ValueError for a text that cannot end a sequence, and for too many of them."""
    if len(texts) > MAX_BREAKERS:
        raise ValueError(f"there are {len(texts)} sequence breakers, and {MAX_BREAKERS} is the most: send fewer")
    for text in texts:
        size = len(text.encode("utf-8", "surrogatepass"))
        if not 0 < size <= MAX_BREAKER or "\x00" in text:
            raise ValueError(
                f"the sequence breaker {text[:20]!r} has {size} bytes: give 1 to {MAX_BREAKER} bytes, none of them zero"
            )
