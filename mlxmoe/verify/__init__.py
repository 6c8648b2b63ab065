"""Proof on the user's own model that streaming changes nothing: against stock mlx-lm, bit for bit.

The streaming side is the Decoder that `stream` runs. The other side is mlx-lm's model, loaded whole by mlx-lm. A
model too large to hold whole is compared layer by layer: each MoE layer's output, on the inputs that it really had,
against the stock layer with all its experts; where every layer's output is the same, so are the logits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxmoe.experts.safetensors import read_checkpoint
from mlxmoe.hub import Progress, resolve
from mlxmoe.memory.reading import usable_bytes
from mlxmoe.memory.sizes import parse_bytes
from mlxmoe.verify.layers import compare_layers
from mlxmoe.verify.logits import compare_logits
from mlxmoe.verify.report import VerifyReport, VerifyRow

__all__ = ["VerifyReport", "VerifyRow", "verify"]


def verify(
    model: str | Path | None = None,
    *,
    memory: int | str | None = None,
    layer_by_layer: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    on_row: Callable[[VerifyRow], None] = lambda row: None,
) -> VerifyReport:
    """Compare the streaming engine with stock mlx-lm at one token's need, 25, 50, 75 and 100 % of the experts.

    `layer_by_layer`: None decides by whether the model fits `memory` twice. `on_row` is told each row as it comes.
    Raises what `load` raises, and UnsupportedModelError for a model without routed experts.
    """
    budget = usable_bytes() if memory is None else parse_bytes(memory, "memory")
    folder = resolve(model, revision, progress)
    if layer_by_layer is None:
        layer_by_layer = 2 * read_checkpoint(folder).nbytes > budget
    rows: list[VerifyRow] = []

    def add(row: VerifyRow) -> None:
        rows.append(row)
        on_row(row)

    compare = compare_layers if layer_by_layer else compare_logits
    compare(folder, budget, trust_remote_code, add)
    return VerifyReport(str(model or "built-in demo model"), not layer_by_layer, tuple(rows))
