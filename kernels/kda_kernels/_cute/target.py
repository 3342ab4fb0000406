"""Architectures that kernels are compiled for, and which of them a device gets.

Lives here: names and facts of targets, nothing that needs CUTLASS or a GPU. Not here: compiling.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """An architecture.

    Attributes:
        arch: the name that the compiler knows, such as ``sm_90a``.
        capability: the compute capability (major, minor) of its devices.
    """

    arch: str
    capability: tuple[int, int]

    @property
    def can_overlap(self) -> bool:
        """Whether a kernel can start while the one before ends (programmatic dependent launch)."""
        return self.capability >= (9, 0)


TARGETS = (
    Target("sm_80", (8, 0)),
    Target("sm_86", (8, 6)),
    Target("sm_89", (8, 9)),
    Target("sm_90a", (9, 0)),
    Target("sm_100a", (10, 0)),
    Target("sm_103a", (10, 3)),
    Target("sm_120a", (12, 0)),
)
"""Every architecture that tests compile the kernels for, by capability; they ran on sm_90a only."""


def target_of(capability: tuple[int, int]) -> Target | None:
    """Return the target of a compute capability, None where there is none.

    Code for one minor version runs on later ones of the same major version, except where its
    architecture is specific (the trailing ``a``), so 8.7 is served by sm_86 and 10.1 by nobody.
    """
    major, _ = capability
    found = None
    for target in TARGETS:
        if target.capability == capability:
            return target
        if target.capability < capability and target.capability[0] == major:
            found = None if target.arch.endswith("a") else target
    return found
