"""The machine as mlxmoe sees it: facts gathered, then judged. Downloads nothing, changes nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxmoe.doctor.checks import Finding, judge
from mlxmoe.doctor.facts import Facts, gather
from mlxmoe.doctor.machine import Machine
from mlxmoe.hub import resolve
from mlxmoe.memory.reading import MemoryReader

__all__ = ["Facts", "Finding", "Report", "examine"]


@dataclass(frozen=True, slots=True)
class Report:
    """What was found, and what follows from it."""

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing is wrong; notes are not."""
        return all(finding.level == "note" for finding in self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "healthy": self.healthy,
            "findings": [asdict(finding) for finding in self.findings],
            "facts": self.facts.as_dict(),
        }


def examine(
    model: str | Path | None = None,
    *,
    revision: str | None = None,
    machine: Machine | None = None,
    reader: MemoryReader | None = None,
) -> Report:
    """Look at this machine and, where `model` is given, read from its files for some two seconds.

    `model`: a folder, or a hub id that was downloaded before. `machine`, `reader`: whom to ask. Raises
    ModelNotFoundError for a model that is not here.
    """
    folder = None if model is None else resolve(model, revision, download=False)
    facts = gather(machine or Machine(), reader or MemoryReader(), folder)
    return Report(facts, judge(facts))
