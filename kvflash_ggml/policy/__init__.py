"""Who stays resident: one policy a file. Importing the package registers them all; nothing native is needed."""

from __future__ import annotations

from ..errors import ConfigError
from . import drafter, lru, oracle, qk, statistics  # noqa: F401 (registers)
from .base import REGISTRY, Exact, Scorer

__all__ = ["names", "resolve"]


def names() -> list[str]:
    """Every policy that can be asked for by name."""
    return [lru.NAME, *REGISTRY]


def resolve(policy: str | Scorer) -> Scorer | None:
    """A scorer by name, or the object itself; None for pure recency."""
    if not isinstance(policy, str):
        if not isinstance(policy, Scorer):
            raise ConfigError(f"a policy is a name or an object with the methods of Scorer, not {policy!r}")
        _check_whole(policy)
        return policy
    if policy == lru.NAME:
        return None
    if policy not in REGISTRY:
        raise ConfigError(f"there is no policy {policy!r}: use one of {', '.join(names())}")
    return REGISTRY[policy]()


def _check_whole(policy: Scorer) -> None:
    """ConfigError for one that asks for attention masses and does not say how many: it would never be given any."""
    if hasattr(policy, "masses_wanted") and not isinstance(policy, Exact):
        raise ConfigError(
            f"policy '{policy.name}' has masses_wanted() and no most_masses(), by which room is left for them: "
            f"define both, or neither"
        )
