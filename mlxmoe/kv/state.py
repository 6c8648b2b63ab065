"""The state of a KV cache as values: what there is to keep of each cache class, and how it is put back.

Knows no files and no tokens. A state is put back into the empty cache that the model's definition makes, never into
one made from what a file says: so a cache may hold what only its maker can give it, and a file cannot name a class to
be run. A class that is not in `KINDS` is refused by name, because a cache of which a part was forgotten would go on
with the wrong words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from mlxmoe.errors import SavedStateError

TOKEN_AXIS = -2  # of the arrays of a class that grows: [..., tokens, width]


@dataclass(frozen=True, slots=True)
class Kind:
    """What there is to know of a cache class.

    `state`: the attributes that hold all it has seen; set one after the other, they put it back. `fixed`: those that
    its maker chose: a state fits only a cache with the same. `grows`: whether a cache's state after fewer tokens is a
    beginning of its state after more, along TOKEN_AXIS, with `offset` counting the tokens. `short`: the values of
    `state` without what it will never look at again.
    """

    state: tuple[str, ...] = ("state",)
    fixed: tuple[str, ...] = ()
    grows: Callable[[Any], bool] = lambda cache: False
    short: Callable[[Any], list[Any]] | None = None


def _window_of(cache: Any) -> list[Any]:
    """A RotatingKVCache's state after a chunk: it holds the whole chunk, and drops all but its window at the next."""
    keys, values, offset, keep, max_size, index = cache.state
    if keys is None or (surplus := keys.shape[TOKEN_AXIS] - max_size) <= 0:
        return [cache.state]
    assert index == keys.shape[TOKEN_AXIS], "a cache with more than its window has just seen several tokens"

    def window(array: mx.array) -> mx.array:
        return mx.concatenate([array[..., :keep, :], array[..., keep + surplus :, :]], axis=TOKEN_AXIS)

    return [(window(keys), window(values), offset, keep, max_size, max_size)]


def _always(cache: Any) -> bool:
    return True


def _without_window(cache: Any) -> bool:
    return cache.window is None


# By module and class. mlx-lm's `state` of the first five holds everything that an instance has (keys and values with
# the room that was made ahead, offset, where it rotates, padding); that of LayerCache cannot be set.
KINDS: Mapping[str, Kind] = MappingProxyType({
    "mlx_lm.models.cache.KVCache": Kind(grows=_always),
    "mlx_lm.models.cache.QuantizedKVCache": Kind(fixed=("group_size", "bits"), grows=_always),
    "mlx_lm.models.cache.RotatingKVCache": Kind(fixed=("max_size", "keep"), short=_window_of),
    "mlx_lm.models.cache.ChunkedKVCache": Kind(fixed=("chunk_size",)),
    "mlx_lm.models.cache.ArraysCache": Kind(),
    "mlx_lm.models.deepseek_v41.LayerCache": Kind(
        state=("offset", "window", "compress_kv", "index_k", "pending_kv", "pending_gate"), fixed=("window_size",)
    ),
    "mlxmoe.kv.window.SlidingWindowKVCache": Kind(
        state=("content",), fixed=("window", "sinks", "kv_bits", "scheme"), grows=_without_window
    ),
})  # fmt: skip

# Several caches in one layer: each is kept by its own kind.
LIST_KIND = "mlx_lm.models.cache.CacheList"


@dataclass(frozen=True, slots=True)
class CacheState:
    """What one cache has seen. Its arrays are not to be written to; a cache that they are put into does not.

    `kind`: a name of KINDS or LIST_KIND. `fixed`: what its maker chose. `values`: one tree for each attribute of the
    kind's `state`: arrays, numbers and None in lists and tuples. `parts`: the states of a list's caches. `span`: of a
    kind that grows, the tokens from the first to before the second, where it holds those alone.
    """

    kind: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    values: Sequence[Any] = ()
    parts: Sequence[CacheState] = ()
    span: tuple[int, int] | None = None

    def arrays(self) -> Iterator[mx.array]:
        """Every array, in an order that depends on the kind alone."""
        yield from _leaves(self.values)
        for part in self.parts:
            yield from part.arrays()

    @property
    def grows(self) -> bool:
        """Whether it holds the tokens of its span alone, all parts of it; then a cache of them can be trimmed."""
        return all(part.grows for part in self.parts) if self.parts else self.span is not None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


def form(caches: Sequence[Any]) -> list[Any]:
    """What makes a state fit `caches`, as JSON values: each one's class, and what its maker chose.

    Raises SavedStateError for a class that is not known.
    """
    forms = []
    for layer, cache in enumerate(caches):
        name = _kind_name(cache, layer)
        chosen = form(cache.caches) if name == LIST_KIND else [getattr(cache, key) for key in KINDS[name].fixed]
        forms.append([name, chosen])
    return forms


def take(caches: Sequence[Any], span: tuple[int, int] | None = None) -> list[CacheState]:
    """The states of `caches`, evaluated: whole and as they are, or with a `span` only what it takes to go on.

    That is the tokens in `span` alone, the last of which the caches have just seen, where a kind grows.

    Holds no more memory than `nbytes` says: a view of a larger array is copied, anything else is shared until the
    cache writes to it. Raises SavedStateError for a class that is not known.
    """
    states = [_take(cache, span, layer) for layer, cache in enumerate(caches)]
    mx.eval([list(state.arrays()) for state in states])
    return states


def put(states: Sequence[CacheState], caches: Sequence[Any]) -> None:
    """Put whole states into empty caches as the model's definition made them. Modifies `caches`.

    Raises SavedStateError if they do not fit, and leaves the caches as they were.
    """
    refuse_misfit(states, caches)
    for state, cache in zip(states, caches, strict=True):
        _put(state, cache)


def refuse_misfit(states: Sequence[CacheState], caches: Sequence[Any]) -> None:
    """Raise SavedStateError if `states` do not fit `caches`. Looks at no array."""
    if len(states) != len(caches):
        raise SavedStateError(f"The saved state has {len(states)} caches, but the model makes {len(caches)}.")
    for layer, (state, cache) in enumerate(zip(states, caches, strict=True)):
        _refuse_misfit(state, cache, layer)


def join(run: Sequence[CacheState], surplus: int = 0) -> CacheState:
    """One whole state of one cache from those taken of it at growing numbers of tokens, the last of which it is.

    Each may hold only the tokens since the one before it. `surplus`: of a state that grows, so many of the last
    tokens are left out, though its offset counts them: the cache that it is put into has to be trimmed by as many.
    """
    last = run[-1]
    if last.parts:
        runs = zip(*(state.parts for state in run), strict=True)
        return CacheState(last.kind, parts=[join(parts, surplus) for parts in runs])
    if last.span is None:
        return last
    pieces = [state for state in run if state.span is not None]
    spans = [piece.span for piece in pieces if piece.span]
    ends = [0, *(end for _, end in spans)]
    assert [start for start, _ in spans] == ends[:-1], f"pieces {spans} do not follow one another"
    values = [piece.values for piece in pieces]
    if surplus:
        kept = last.span[1] - last.span[0] - surplus
        values[-1] = _mapped(values[-1], lambda array: array[..., :kept, :])
    return CacheState(last.kind, last.fixed, _joined(values))


def _take(cache: Any, span: tuple[int, int] | None, layer: int) -> CacheState:
    name = _kind_name(cache, layer)
    if name == LIST_KIND:
        return CacheState(name, parts=[_take(part, span, layer) for part in cache.caches])
    kind = KINDS[name]
    fixed = {key: getattr(cache, key) for key in kind.fixed}
    values = [getattr(cache, key) for key in kind.state]
    if span is not None and kind.short is not None:
        values = kind.short(cache)
    if span is None or not kind.grows(cache) or cache.offset != span[1] or cache.keys is None:
        return CacheState(name, fixed, _mapped(values, mx.contiguous))
    start, end = span
    return CacheState(name, fixed, _mapped(values, lambda array: mx.contiguous(array[..., start:end, :])), span=span)


def _kind_name(cache: Any, layer: int) -> str:
    """The cache's name in KINDS. A subclass has a name of its own: it may keep more than its parent does."""
    name = f"{type(cache).__module__}.{type(cache).__qualname__}"
    if name == LIST_KIND:
        for part in cache.caches:
            _kind_name(part, layer)
    elif name not in KINDS:
        raise SavedStateError(
            f"The model keeps cache {layer} in a {name}, whose state is not known here: it cannot be saved or "
            f"reused. Known are {', '.join(sorted(kind.rpartition('.')[2] for kind in [*KINDS, LIST_KIND]))}."
        )
    return name


def _refuse_misfit(state: CacheState, cache: Any, layer: int) -> None:
    name = _kind_name(cache, layer)
    if state.kind != name:
        raise SavedStateError(
            f"Cache {layer} was saved as a {state.kind.rpartition('.')[2]}, but this engine has a "
            f"{name.rpartition('.')[2]} there. Load the model, or "
            f"restore the session, with the same window and bits as when it was saved."
        )
    if name == LIST_KIND:
        if len(state.parts) != len(cache.caches):
            raise SavedStateError(f"Cache {layer} was saved with {len(state.parts)} parts, not {len(cache.caches)}.")
        for part, inner in zip(state.parts, cache.caches, strict=True):
            _refuse_misfit(part, inner, layer)
        return
    here = {key: getattr(cache, key) for key in KINDS[name].fixed}
    if differing := [key for key in {**here, **state.fixed} if here.get(key) != state.fixed.get(key)]:
        saved, ours = (", ".join(f"{key}={of.get(key)}" for key in differing) for of in (state.fixed, here))
        raise SavedStateError(
            f"Cache {layer} was saved with {saved}, but this engine has {ours}. Load the model with the same "
            f"options, and by the same mlxmoe, as when it was saved."
        )
    if len(state.values) != len(KINDS[name].state) or state.span is not None:
        raise SavedStateError(f"Cache {layer} was saved in part only.")


def _put(state: CacheState, cache: Any) -> None:
    if state.kind == LIST_KIND:
        for part, inner in zip(state.parts, cache.caches, strict=True):
            _put(part, inner)
        return
    for key, value in zip(KINDS[state.kind].state, state.values, strict=True):
        # mx.contiguous makes a handle of its own: caches write in place, and MLX copies what another handle holds
        own = _mapped(value, mx.contiguous)
        mx.eval(list(_leaves(own)))
        setattr(cache, key, own)


def _joined(pieces: Sequence[Any]) -> Any:
    """Trees of the same form as one: arrays put together along TOKEN_AXIS, of anything else the last."""
    last = pieces[-1]
    if isinstance(last, mx.array):
        return mx.concatenate(list(pieces), axis=TOKEN_AXIS)
    if isinstance(last, list | tuple):
        return type(last)(_joined([piece[number] for piece in pieces]) for number in range(len(last)))
    return last


def _mapped(tree: Any, change: Callable[[mx.array], mx.array]) -> Any:
    """A tree of its own with every array changed."""
    if isinstance(tree, mx.array):
        return change(tree)
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(item, change) for item in tree)
    return tree


def _leaves(tree: Any) -> Iterator[mx.array]:
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, list | tuple):
        for item in tree:
            yield from _leaves(item)
