"""The picture of mlxmoe profile --plot: experts by layers, and the hit curve. Needs the extra `plot` (matplotlib)."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mlxmoe import MlxMoeError, RequestError, RoutingStats
from mlxmoe.writing import replacing

INK, LINE = "#333333", "#1f6f8b"


def refuse_without_matplotlib() -> None:
    """Raise RequestError, which names the extra, where it is not installed."""
    if find_spec("matplotlib") is None:
        raise RequestError('--plot needs matplotlib, an extra: pip install "mlxmoe[plot]", or leave --plot away.')


def draw(stats: RoutingStats, path: Path) -> None:
    """Write the PNG `path`, which takes its place when it is whole. Raises MlxMoeError."""
    from matplotlib.colors import PowerNorm  # an extra: only who draws needs it
    from matplotlib.figure import Figure

    most = len(stats.hit_rates) - 1
    used = np.full((most, len(stats.layers)), np.nan)
    for column, layer in enumerate(stats.layers):
        # An even router is 1 everywhere, whatever the number of experts. The most used at the bottom.
        used[: layer.num_experts, column] = np.sort(layer.shares)[::-1] * layer.num_experts
    figure = Figure(figsize=(11, 4.5), layout="constrained", dpi=144)
    heat, curve = figure.subplots(1, 2)

    # By the square root: one busy expert leaves differences between the others visible.
    shown = (-0.5, len(stats.layers) - 0.5, 0.5, most + 0.5)
    norm = PowerNorm(0.5, vmin=0)
    image = heat.imshow(used, aspect="auto", origin="lower", norm=norm, interpolation="nearest", extent=shown)
    figure.colorbar(image, ax=heat, label="uses, relative to an even share (1)")
    heat.set(title=f"Use of each expert, {stats.tokens} tokens", xlabel="layer", ylabel="expert's rank by use")
    heat.yaxis.get_major_locator().set_params(integer=True)
    ticks = np.unique(np.linspace(0, len(stats.layers) - 1, min(len(stats.layers), 9)).astype(int))
    heat.set_xticks(ticks, [str(stats.layers[tick].layer) for tick in ticks])

    slots = np.arange(1, most + 1)
    for layer in stats.layers:
        curve.plot(np.arange(1, layer.num_experts + 1), layer.hit_rates[1:], color=LINE, alpha=0.15, linewidth=1)
    curve.plot(slots, stats.hit_rates[1:], color=LINE, linewidth=2.5, label="all layers")
    curve.plot([], [], color=LINE, alpha=0.3, linewidth=1, label="each layer")
    curve.axvline(stats.top_k, color=INK, linewidth=1, linestyle=":", label=f"what one token needs ({stats.top_k})")
    curve.set(title="Hits of an LRU cache, cold at first", xlabel="slots a layer", ylabel="hit rate")
    curve.set(xlim=(1, most), ylim=(0, 1))
    curve.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    curve.grid(alpha=0.25)
    curve.legend(loc="lower right", frameon=False)
    for axes in (heat, curve):
        axes.spines[["top", "right"]].set_visible(False)
    try:
        with replacing(path.expanduser(), durable=False) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise MlxMoeError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from error
