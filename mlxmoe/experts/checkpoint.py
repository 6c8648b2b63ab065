"""Where each expert's bytes lie in the checkpoint's files. Knows bytes and files, not MLX."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ExpertTensor:
    """One tensor of a layer's experts as it lies on disk.

    `nbytes`: bytes of one expert's part. `files[e]`, `offsets[e]`: where expert `e`'s part starts.
    """

    nbytes: int
    files: Sequence[Path]
    offsets: Sequence[int]

    def __post_init__(self) -> None:
        assert len(self.files) == len(self.offsets), "one file and one offset for each expert"

    @classmethod
    def stacked(cls, file: Path, offset: int, nbytes: int, num_experts: int) -> ExpertTensor:
        """Experts one behind the other on axis 0, `nbytes` in all: MLX's own layout."""
        assert nbytes % num_experts == 0, "experts of one layer are of one size"
        stride = nbytes // num_experts
        return cls(stride, (file,) * num_experts, range(offset, offset + nbytes, stride))
