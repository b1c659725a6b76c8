"""The rule that keeps texts apart: which conversations a request may see and touch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Access:
    """A request's access to conversations. Everything that shows or touches a conversation asks `may` with its salt.

    owner: how the salts of the request's own conversations begin; "" where all conversations are everybody's.
    """

    owner: str = ""

    @classmethod
    def of(cls, key: str) -> Access:
        """To the conversations of one key only."""
        return cls(_digest(key, ""))

    def may(self, salt: str) -> bool:
        """May the request see and touch a conversation of this salt?"""
        return salt.startswith(self.owner)

    def salt(self, cache_salt: str) -> str:
        """The salt of this request's own conversations. cache_salt: chosen by the client, "" for none."""
        return self.owner + (_digest("", cache_salt) if cache_salt else "")


def _digest(key: str, salt: str) -> str:
    return hashlib.sha256(f"{key}\0{salt}".encode("utf-8", "surrogatepass")).hexdigest()[:16]
