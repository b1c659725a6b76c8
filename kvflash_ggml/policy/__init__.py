"""Which chunks stay resident: one policy a file, imported when somebody asks for it; no native library is needed.

Another distribution adds a policy by an entry point of the group `kvflash_ggml.policies`. The entry point has the name
of the policy, and names a module that registers it when imported.
"""

from __future__ import annotations

from importlib import import_module

from ..errors import ConfigError
from .base import DRAFTER, LRU, REGISTRY, Exact, Scorer

__all__ = ["check", "names", "resolve"]

OWN = ("qk", DRAFTER)
"""The policies of this package: each is a module of its name."""

PLUGINS = "kvflash_ggml.policies"
"""The group of entry points."""


def names() -> list[str]:
    """Return the policies of this package, and all that were registered since."""
    return [*dict.fromkeys((LRU, *OWN, *REGISTRY))]


def check(policy: str) -> None:
    """Import the policy of this name, unless it is registered. ConfigError if there is none."""
    if policy in OWN:
        import_module(f"{__name__}.{policy}")
    elif policy not in names():
        from importlib.metadata import entry_points  # here, since it brings the email package

        for point in entry_points(group=PLUGINS, name=policy):
            point.load()
    if policy not in names():
        raise ConfigError(
            f"there is no policy {policy!r}: use one of {', '.join(names())}, or install the package that has it"
        )


def resolve(policy: str | Scorer) -> Scorer | None:
    """Return a scorer by name, or the object itself; None for pure recency. ConfigError for anything else."""
    if not isinstance(policy, str):
        if not isinstance(policy, Scorer):
            raise ConfigError(f"a policy is a name or an object with the methods of Scorer, not {policy!r}")
        if hasattr(policy, "masses_wanted") and not isinstance(policy, Exact):
            raise ConfigError(
                f"policy '{policy.name}' has masses_wanted() and no most_masses(), by which room is left for them: "
                f"define both, or neither"
            )
        return policy
    check(policy)
    return None if policy == LRU else REGISTRY[policy]()
