"""Patterns of JSON schemas, and ranges of numbers, as patterns of JSON text that llama.cpp's converter understands.

A schema's `pattern` speaks of a string's value, llama.cpp's converter of what a model writes. So a quote within the
value is two characters here, and a pattern that is not anchored allows any text around it. What is written is a small
dialect: `[...]` with escapes of code points, groups, `|`, and counts behind groups.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache

from ..errors import ConfigError

MOST_CHARACTERS = 512
"""Of a pattern."""

MOST_REPEATED = 1_000_000
"""Of a quantifier, and of a `maxLength`."""

MOST_NESTED = 40
"""Groups within groups. The converter's limit is 100, and long repetitions take two."""

MOST_COPIED = 4096
"""Characters of a pattern and their copies: a count above `_STEP` writes what it repeats six times."""

_STEP = 1000
"""Repetitions that one rule of a grammar writes out. llama.cpp's limit is 2,000."""

_DIGITS = 15
"""Significant digits of a number with bounds: a double holds so many, so that no rounding crosses a bound."""

_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points as (first, last), in their order and apart from each other."""


class Unheld(ConfigError):
    """A pattern that no grammar can hold, or that is none."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of several."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`."""

    sign: str


@dataclass(frozen=True, slots=True)
class Row:
    """Parts behind each other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, at least `least` times, and at most `most` times. None is without end."""

    part: Node
    least: int
    most: int | None


Node = Chars | Anchor | Row | Choice | Repeat


def union(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges in their order, those that touch joined."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if out and first <= out[-1][1] + 1:
            out[-1] = out[-1][0], max(out[-1][1], last)
        else:
            out.append((first, last))
    return tuple(out)


def without(ranges: Ranges, *others: tuple[int, int]) -> Ranges:
    """Return the code points of `ranges` that are in none of the others."""
    out: list[tuple[int, int]] = []
    for first, last in ranges:
        at = first
        for low, high in union(others):
            if high < at or low > last:
                continue
            if low > at:
                out.append((at, low - 1))
            at = high + 1
        if at <= last:
            out.append((at, last))
    return tuple(out)


ALL: Ranges = ((0, 0xD7FF), (0xE000, _LAST))
"""Without surrogates, which are no characters."""

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((9, 13), (32, 32))
_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
"""Line ends, which `.` is not."""

# Validators differ beyond ASCII: to some every letter is a word character. What all of them take is allowed.
_WIDE = {
    "d": _DIGIT,
    "w": union((*_WORD, (0x80, _LAST))),
    "s": union(
        (
            *_SPACE, (0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
            (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
        )
    ),
}  # fmt: skip
_NARROW = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROL = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 0x22: '"', 0x5C: "\\"}
"""Characters that JSON escapes, by their escapes."""

ANY = Repeat(Chars(ALL), 0, None)
"""Any text."""

_COUNT = re.compile(r"\{(?=,?\d)(\d*)(,?)(\d*)\}")
"""A quantifier with numbers."""


class _Parser:
    """Reads a pattern. Unheld says what it has that cannot be held."""

    def __init__(self, pattern: str) -> None:
        self.text = pattern
        self.at = 0
        self.depth = 0

    def parsed(self) -> Node:
        node = self.choice()
        if self.at < len(self.text):
            raise Unheld("a parenthesis closes nothing")
        return node

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) * found
        return found

    def match(self, pattern: str | re.Pattern[str]) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def next(self) -> str:
        if self.at >= len(self.text):
            raise Unheld("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def choice(self) -> Node:
        parts = [self.sequence()]
        while self.take("|"):
            parts.append(self.sequence())
        return parts[0] if len(parts) == 1 else Choice(tuple(parts))

    def sequence(self) -> Node:
        parts: list[Node] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            parts.append(self.quantified(self.atom()))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def atom(self) -> Node:
        char = self.next()
        if char in "*+?":
            raise Unheld(f"{char!r} has nothing to repeat")
        if char in "^$":
            return Anchor(char)
        if char == ".":
            return Chars(without(ALL, *_ENDS))
        if char == "(":
            return self.group()
        if char == "[":
            return Chars(self.members())
        if char == "\\":
            return Chars(self.escape())
        if _COUNT.match(self.text, self.at - 1):
            raise Unheld("'{' has nothing to repeat")
        return Chars(((ord(char), ord(char)),))

    def group(self) -> Node:
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise Unheld(f"groups are nested more than {MOST_NESTED} deep")
        if self.take("?"):
            for sign, name in (("=", "ahead"), ("!", "ahead"), ("<=", "behind"), ("<!", "behind")):
                if self.peek(sign):
                    raise Unheld(f"a grammar cannot look {name}, as '(?{sign}' asks")
            if not self.match(r"P?<[A-Za-z_][A-Za-z0-9_]*>") and not self.take(":"):
                raise Unheld(f"'(?{self.text[self.at : self.at + 1]}' is not supported: write a plain group")
        node = self.choice()
        if not self.take(")"):
            raise Unheld("a group has no end")
        self.depth -= 1
        return node if isinstance(node, Choice) else Choice((node,))

    def quantified(self, node: Node) -> Node:
        while self.at < len(self.text):
            if counted := self.match(_COUNT):
                least = int(counted[1][:12] or 0)
                most = least if not counted[2] else int(counted[3][:12]) if counted[3] else None
            elif self.peek("*") or self.peek("+") or self.peek("?"):
                least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[self.next()]
            else:
                break
            if isinstance(node, Repeat | Anchor):
                raise Unheld("a quantifier has nothing to repeat")
            if max(least, most or 0) > MOST_REPEATED:
                raise Unheld(f"it repeats something more than {MOST_REPEATED} times")
            if most is not None and most < least:
                raise Unheld("a quantifier ends before it begins")
            self.take("?")  # the same texts, read in another order
            node = Repeat(node, least, most)
        return node

    def members(self) -> Ranges:
        """Read a class, behind its bracket."""
        negated, found, wide = self.take("^"), list[tuple[int, int]](), list[tuple[int, int]]()
        if self.peek("]"):
            raise Unheld("a class is empty: write \\] for a bracket")
        while not self.take("]"):
            first, widest = self.member()
            single = len(first) == 1 and first[0][0] == first[0][1]
            if single and self.peek("-") and not self.peek("-]"):
                self.at += 1
                last, _ = self.member()
                if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise Unheld("a range of a class ends before it begins")
                first = widest = ((first[0][0], last[0][0]),)
            found += first
            wide += widest
        return without(ALL, *wide) if negated else without(union(found), (0xD800, 0xDFFF))

    def member(self) -> tuple[Ranges, Ranges]:
        """Read what a part of a class has for every validator, and for some."""
        char = self.next()
        if char != "\\":
            return (single := ((ord(char), ord(char)),)), single
        if self.take("b"):
            return ((8, 8),), ((8, 8),)
        if self.peek("d") or self.peek("w") or self.peek("s"):
            kind = self.next()
            return _NARROW[kind], _WIDE[kind]
        found = self.escape()
        return found, found

    def escape(self) -> Ranges:
        """Read the characters of an escape, behind its backslash."""
        char = self.next()
        if char in _NARROW:
            return _NARROW[char]
        if char.lower() in _WIDE:
            return without(ALL, *_WIDE[char.lower()])
        if char in "bB":
            raise Unheld(f"'\\{char}' looks at two characters, which a grammar cannot do")
        if char in _CONTROL:
            return ((_CONTROL[char], _CONTROL[char]),)
        if char == "0" and self.match(r"(?!\d)"):
            return ((0, 0),)
        if char in "xu":
            code = self.code(2 if char == "x" else 4)
            if 0xD800 <= code < 0xDC00 and self.take("\\u"):
                code = 0x10000 + ((code - 0xD800) << 10) + (self.code(4) - 0xDC00)
            if code > _LAST or 0xD800 <= code < 0xE000:
                raise Unheld(f"'\\{char}' names no character")
            return ((code, code),)
        if char.isascii() and char.isalnum():
            why = "names characters by a property" if char in "pP" else "is not supported"
            why = "repeats a group's text, which a grammar cannot do" if char in "123456789k" else why
            raise Unheld(f"'\\{char}' {why}")
        return ((ord(char), ord(char)),)

    def code(self, digits: int) -> int:
        braced = self.match(r"\{([0-9a-fA-F]{1,6})\}") if digits == 4 else None
        found = braced or self.match(f"([0-9a-fA-F]{{{digits}}})")
        if not found:
            raise Unheld("an escape of a code point has too few digits")
        return int(found[1], 16)


def _has_anchor(node: Node) -> bool:
    if isinstance(node, Repeat):
        return _has_anchor(node.part)
    return isinstance(node, Anchor) or (isinstance(node, Row | Choice) and any(map(_has_anchor, node.parts)))


def _anchored(node: Node, sign: str) -> Node:
    """Anchor a pattern on one side: where the anchor is missing, any text goes on."""
    first = sign == "^"
    if isinstance(node, Choice):
        return Choice(tuple(_anchored(part, sign) for part in node.parts))
    parts: list[Node] = list(node.parts) if isinstance(node, Row) else [node]
    edge = parts[0 if first else -1] if parts else None
    if isinstance(edge, Anchor) and edge.sign == sign:
        while parts and parts[0 if first else -1] == edge:
            parts.pop(0 if first else -1)
    elif isinstance(edge, Choice) and _edges(edge, sign):
        parts[0 if first else -1] = _anchored(edge, sign)
    elif parts != [ANY]:
        parts.insert(0 if first else len(parts), ANY)
    return Row(tuple(parts))


def _edges(node: Node, sign: str) -> bool:
    """Tell whether a pattern has this anchor at its edge, in one of its choices at least."""
    if isinstance(node, Choice):
        return any(_edges(part, sign) for part in node.parts)
    if isinstance(node, Row):
        return bool(node.parts) and _edges(node.parts[0 if sign == "^" else -1], sign)
    return isinstance(node, Anchor) and node.sign == sign


def lengths(node: Node) -> tuple[int, int | None]:
    """Return how many characters the texts of a pattern have at least, and at most."""
    if isinstance(node, Chars):
        return 1, 1
    if isinstance(node, Anchor):
        return 0, 0
    if isinstance(node, Repeat):
        least, most = lengths(node.part)
        over = None if most is None or node.most is None else most * node.most
        return least * node.least, 0 if most == 0 or node.most == 0 else over
    each = [lengths(part) for part in node.parts]
    longest = [most for _, most in each if most is not None]
    endless = len(longest) < len(each)
    if isinstance(node, Choice):
        return min(least for least, _ in each), None if endless else max(longest)
    return sum(least for least, _ in each), None if endless else sum(longest)


def limited(node: Node, least: int, most: int | None) -> Node | None:
    """Return a pattern for those of its texts that have so many characters. None if that cannot be written."""
    shortest, longest = lengths(node)
    if shortest >= least and (most is None or (longest is not None and longest <= most)):
        return node
    one = node
    while isinstance(one, Choice | Row) and len(one.parts) == 1:
        one = one.parts[0]
    if isinstance(one, Repeat) and lengths(one.part) == (1, 1):
        tops = [top for top in (one.most, most) if top is not None]
        bottom, top = max(one.least, least), min(tops) if tops else None
        return Repeat(one.part, bottom, top) if top is None or bottom <= top else None
    return None


def _copied(node: Node) -> int:
    """Count the characters that a pattern writes, a class as one."""
    if isinstance(node, Repeat):
        return _copied(node.part) * (6 if max(node.least, node.most or 0) > _STEP else 1)
    return sum(map(_copied, node.parts)) if isinstance(node, Row | Choice) else 1


def parsed(pattern: str) -> Node:
    """Return a pattern as a tree that stands for whole texts, without anchors. Unheld says why there is none."""
    if len(pattern) > MOST_CHARACTERS:
        raise Unheld(f"it has {len(pattern)} characters, and {MOST_CHARACTERS} is the most")
    node = _anchored(_anchored(_Parser(pattern).parsed(), "^"), "$")
    if _has_anchor(node):
        raise Unheld("an anchor stands in its middle")
    if lengths(node)[0] > MOST_REPEATED:
        raise Unheld(f"its texts have more than {MOST_REPEATED} characters")
    if _copied(node) > MOST_COPIED:
        raise Unheld(f"counts above {_STEP} are nested too deep")
    return node


def quoted(node: Node) -> str:
    """Return what a model may write for a string whose value is one of the pattern's texts."""
    return f"{_code(0x22)}({_written(node)}){_code(0x22)}"


def _code(code: int) -> str:
    if code < 0x80 and chr(code).isalnum():
        return chr(code)
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"


def _class(ranges: Ranges) -> str:
    return "[" + "".join(_code(a) if a == b else f"{_code(a)}-{_code(b)}" for a, b in ranges) + "]"


@lru_cache(256)
def _char(ranges: Ranges) -> str:
    """Write one character in JSON: itself, or its escape."""
    size = sum(last - first + 1 for first, last in ranges)
    plain = without(ranges, (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F))
    ways = [_class(plain)] if plain else []
    ways += [_code(0x5C) + _code(ord(sign)) for code, sign in _SHORT.items() if _in(ranges, code)]
    if size <= 64:  # others are rarely meant, and are allowed where few are
        odd = [code for code in (*range(0x20), 0x7F) if code not in _SHORT and _in(ranges, code)]
        ways += [_code(0x5C) + f"u{code:04X}" for code in odd]
    if not ways:
        raise Unheld("a class has no character")
    return ways[0] if len(ways) == 1 and plain else f"({'|'.join(ways)})"


def _in(ranges: Ranges, code: int) -> bool:
    return any(first <= code <= last for first, last in ranges)


def _written(node: Node) -> str:
    if isinstance(node, Chars):
        (first, last), *others = node.ranges or ((1, 0),)
        if first == last and not others and first not in (*range(0x20), 0x22, 0x5C, 0x7F):
            return _code(first)
        return _char(node.ranges)
    if isinstance(node, Row):
        return "".join(map(_written, node.parts))
    if isinstance(node, Choice):
        return f"({'|'.join(map(_written, node.parts))})"
    assert isinstance(node, Repeat)
    return _times(f"({_written(node.part)})", node.least, node.most)


def _times(group: str, least: int, most: int | None) -> str:
    """Repeat a group `least` to `most` times, where no count is above `_STEP`."""
    if most is None and least <= _STEP:
        return f"{group}*" if least == 0 else f"{group}+" if least == 1 else f"{group}{{{least},}}"
    if (least, most) == (0, 1):
        return f"{group}?"
    if most is not None and most <= _STEP:
        return f"{group}{{{least},{most}}}" if most else ""
    steps, rest = divmod(least, _STEP)
    step = f"({group}{{{_STEP},{_STEP}}})"
    begun = "".join((f"{step}{{{steps},{steps}}}" if steps else "", f"{group}{{{rest},{rest}}}" if rest else ""))
    if most is None:
        return f"{begun}{group}*"
    steps, rest = divmod(most - least, _STEP)
    ways = [f"{step}{{0,{steps - 1}}}{group}{{0,{_STEP - 1}}}"] if steps else []
    ways.append((f"{step}{{{steps},{steps}}}" if steps else "") + (f"{group}{{0,{rest}}}" if rest else ""))
    return f"{begun}({'|'.join(ways)})"


def _any(count: int, point: int) -> str:
    """Write `count` digits of any value, the last `point` of them behind a point."""
    if count < point or not point:
        return f"([0-9]){{{count},{count}}}" if count > 1 else "[0-9]" * count
    return _any(count - point, 0) + _code(0x2E) + _any(point, 0)


def _between(low: str, high: str, point: int, *, after: bool = False) -> str:
    """Write digits from `low` to `high`, which have as many. after: the point is written already."""
    dot = _code(0x2E) if point and len(low) == point and not after else ""
    after = after or bool(dot)
    if not low:
        return ""
    if low.strip("0") == "" and high.strip("9") == "":
        return dot + _any(len(low), 0 if after else point)
    first, last, rest = low[0], high[0], len(low) - 1
    if first == last:
        return dot + first + _between(low[1:], high[1:], point, after=after)
    ways, begin, end = [], int(first), int(last)
    if low[1:].strip("0"):
        ways.append(first + _between(low[1:], "9" * rest, point, after=after))
        begin += 1
    if high[1:].strip("9"):
        ways.append(last + _between("0" * rest, high[1:], point, after=after))
        end -= 1
    if begin <= end:
        between = _between("0" * rest, "9" * rest, point, after=after)
        ways.insert(0, (str(begin) if begin == end else f"[{begin}-{end}]") + between)
    return f"{dot}({'|'.join(ways)})"


def _whole(low: int, high: int | None, point: int = 0) -> list[str]:
    """Write numbers from `low`, which is 0 or above, to `high`, in units of the last digit behind the point."""
    ways: list[str] = []
    size = max(point + 1, len(str(low)))
    end = 10**size - 1 if high is None else high
    for length in range(size, max(point + 1, len(str(end))) + 1):
        least = 0 if length == point + 1 else 10 ** (length - 1)
        first, last = max(low, least), min(end, 10**length - 1)
        if first <= last:
            ways.append(_between(str(first).zfill(length), str(last).zfill(length), point))
    if high is None:
        ways.append(
            f"[1-9]([0-9]){{{size - point},{max(_DIGITS, size) - point}}}"
            + (_code(0x2E) + _any(point, 0) if point else "")
        )
    return ways


def integers(low: int | None, high: int | None) -> str | None:
    """Return a pattern of the integers between two bounds, which belong to them. None if there is no integer."""
    if low is not None and high is not None and low > high:
        return None
    ways = _whole(max(0, low or 0), high) if high is None or high >= 0 else []
    below = _whole(max(1, -(high or 0)), None if low is None else -low) if low is None or low < 0 else []
    return f"({'|'.join([*ways, *(_code(0x2D) + way for way in below)])})"


def numbers(low: Decimal | None, high: Decimal | None, *, above: bool, below: bool) -> str | None:
    """Return a pattern of the numbers between two bounds, without exponents. None if there is none.

    above, below: the bounds do not belong to them. ConfigError for bounds of more digits than a double holds.
    """
    if low is not None and high is not None and (low > high or (low == high and (above or below))):
        return None
    places = [max(0, -int(bound.normalize().as_tuple().exponent)) for bound in (low, high) if bound]
    point = max(places, default=0)
    size = max((len(str(int(abs(bound) * 10**point))) for bound in (low, high) if bound is not None), default=1)
    tail = _DIGITS - max(size, point + 1)
    if tail < 0:
        raise ConfigError(f"its bounds have {size} digits, and {_DIGITS} is the most")

    def unit(bound: Decimal) -> int:
        return int(bound * 10**point)

    def positive(begin: int, end: int | None, *, over: bool, under: bool) -> list[str]:
        """Write numbers of 0 and above between two bounds, in units of the last digit behind the point."""
        last = None if end is None else end - 1
        inside = last is None or begin + over <= last
        ways = [way + _tail(tail, point) for way in _whole(begin + over, last, point)] if inside else []
        if over and (last is None or begin <= last) and tail:
            ways += [way + ("" if point else _code(0x2E)) + _odd(tail) for way in _whole(begin, begin, point)]
        if end is not None and not under and (end > begin or not over):
            zeros = f"(0){{0,{tail}}}" if point and tail else f"({_code(0x2E)}(0){{1,{tail}}})?" if tail else ""
            ways += [way + zeros for way in _whole(end, end, point)]
        return ways

    up = [] if high is not None and high < 0 else positive(
        max(0, unit(low)) if low is not None else 0, None if high is None else unit(high),
        over=above and low is not None and low >= 0, under=below,
    )  # fmt: skip
    down = [] if low is not None and low >= 0 else positive(
        max(0, -unit(high)) if high is not None else 0, None if low is None else -unit(low),
        over=(below and high is not None and high <= 0) or high is None or high > 0, under=above,
    )  # fmt: skip
    ways = [*up, *(_code(0x2D) + way for way in down)]
    return f"({'|'.join(ways)})" if ways else None


def _tail(most: int, point: int) -> str:
    """Write further digits behind a number that has `point` behind its point."""
    if not most:
        return ""
    return f"([0-9]){{0,{most}}}" if point else f"({_code(0x2E)}([0-9]){{1,{most}}})?"


def _odd(most: int) -> str:
    """Write digits of which one at least is not 0."""
    rest = f"([0-9]){{0,{most - 1}}}" if most > 1 else ""
    return f"([1-9]{rest}|0{_odd(most - 1)})" if most > 1 else "[1-9]"


def _lines(*patterns: str) -> str:
    return "^(" + "|".join(patterns) + ")$"


_YEAR = r"(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
_LEAP = r"(\d\d(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
    rf"|{_LEAP}-02-29)"
)
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_HEX = "[0-9a-fA-F]{1,4}"

FORMATS = {
    "date": _lines(_DATE),
    "time": _lines(_TIME),
    "date-time": _lines(f"{_DATE}T{_TIME}"),
    "duration": _lines(r"P(\d{1,4}W|\d{1,4}[YMD]|\d{1,4}D(T\d{1,4}[HMS])?|T\d{1,4}[HMS]|T\d{1,4}H\d{1,4}M)"),
    "email": _lines(rf"[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}"),
    "hostname": _lines(rf"{_LABEL}(\.{_LABEL}){{0,3}}"),
    "ipv4": _lines(rf"{_BYTE}(\.{_BYTE}){{3}}"),
    "ipv6": _lines(f"({_HEX}:){{7}}{_HEX}", f"({_HEX}:){{1,6}}(:{_HEX})", f"({_HEX}:){{1,7}}:", f"::({_HEX})?"),
    "uri": _lines(r"[A-Za-z][A-Za-z0-9+.-]{0,30}:(//)?[A-Za-z0-9_~.][A-Za-z0-9_~.:/?=&;,+@-]*"),
    "uuid": _lines(_UUID),
    **{f"uuid{n}": _lines(_UUID) for n in range(1, 6)},
}
"""Formats of strings, as patterns."""
