"""What a user may ask of the KV cache: a window, its sinks, bits. Knows no model and no array."""

from __future__ import annotations

from dataclasses import dataclass

from mlxmoe.errors import WindowError

KV_BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class KVSettings:
    """How a KV cache is kept. Raises WindowError for values that make no sense.

    `window`: tokens that a token attends to, itself included; None for all. `sinks`: the first tokens, which stay in
    the window for good. `kv_bits`: 4 or 8 for quantised keys and values, None as the model computes them. Both a
    window and quantised rows are lossy: the words are no longer those of the whole model.
    """

    window: int | None = None
    sinks: int = 4
    kv_bits: int | None = None

    def __post_init__(self) -> None:
        if not _is_count(self.sinks) or self.sinks < 0:
            raise WindowError(f"sinks={self.sinks!r} is no number of tokens: 0 or more.")
        if self.window is not None and (not _is_count(self.window) or self.window <= max(self.sinks, 1)):
            raise WindowError(
                f"window={self.window!r} is too small or no number of tokens: it holds the {self.sinks} sinks and at "
                f"least one token more, {max(self.sinks, 1) + 1} or more."
            )
        if self.kv_bits is not None and (not _is_count(self.kv_bits) or self.kv_bits not in KV_BITS):
            raise WindowError(f"kv_bits={self.kv_bits!r} is not offered: 8, 4, or None for unquantised.")

    @property
    def lossless(self) -> bool:
        """Whether the model's own caches are kept as they are."""
        return self.window is None and self.kv_bits is None


def checked(settings: object) -> KVSettings:
    """`settings` if that is what they are. Raises WindowError for anything else."""
    if not isinstance(settings, KVSettings):
        raise WindowError(
            f"kv_settings={settings!r} is no KVSettings. Write KVSettings(window=4096, kv_bits=8), or leave it out "
            f"for the engine's own."
        )
    return settings


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
