"""From a model folder to a model that computes from banks: plan, banks in place, trunk in memory, and a tokenizer.

Expert weights are never materialised outside a slot: the experts' arrays of the lazy model are replaced by banks
before anything is evaluated, and only then is the trunk read.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from mlxmoe.dividing import PrefillRoom, divide_memory
from mlxmoe.errors import MemoryBudgetError, ModelError, RequestError, brief
from mlxmoe.experts.cache import ExpertCache
from mlxmoe.experts.lookahead import LookaheadMode
from mlxmoe.experts.places import locate_experts
from mlxmoe.experts.profile import ProfileFolder, RoutingProfile
from mlxmoe.experts.reader import ExpertReader
from mlxmoe.hub import Progress
from mlxmoe.identity import FolderIdentity, ModelIdentity, source_states
from mlxmoe.kv.choose import KVChoice
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.experts import MoeLayer
from mlxmoe.memory.plan import KVBytes, Plan
from mlxmoe.opening import OpenedModel, open_folder
from mlxmoe.tree import Tree
from mlxmoe.tuned import Tuning
from mlxmoe.weights import read_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `vocab_size`: token ids it knows; the tokenizer may use fewer.

    `plan`: how the memory is divided, by `tuning` where there is one that fits. `kv`: what a KV cache takes, as
    `kv_choice` makes it. `identify`: which model it is; the first call reads a page of each tensor, and raises
    CheckpointError where its files have changed since.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    path: Path
    vocab_size: int
    plan: Plan
    kv: KVBytes
    kv_choice: KVChoice
    experts: ExpertCache
    identify: Callable[[], ModelIdentity]
    tuning: Tuning | None = None


def load_folder(
    path: Path,
    *,
    experts: int | float | str = "auto",
    memory_bytes: int,
    reserve_bytes: int = 0,
    context: int | None = None,
    progress: Progress | None = None,
    adapter: Path | None = None,
    trust_remote_code: bool = False,
    kv_settings: KVSettings = KVSettings(),  # noqa: B008  # frozen
    lookahead: LookaheadMode = "auto",
    warm: bool = False,
    chunk_tokens: int | None = None,
    tuning: Tuning | None = None,
    identity: FolderIdentity | None = None,
) -> LoadedModel:
    """Load the model in folder `path`, with as many expert slots as the plan for `memory_bytes` gives.

    `warm`: with experts in all of them; where the model's routing profile is known, with the slots where its layers
    want them, and the most used experts in them. `tuning`: what is taken where `experts`, `context` and
    `chunk_tokens` say nothing, as far as it fits. `identity`: of this folder with this adapter, where known already.
    Raises ModelError and its kin for a folder that cannot be used, MemoryBudgetError before anything large is read.
    """
    sources = source_states(path, adapter)  # first: a change after this is one since it was loaded
    opened = open_folder(path, adapter=adapter, trust_remote_code=trust_remote_code, kv_settings=kv_settings)
    files = {**opened.checkpoint.files, **sources}
    identify = partial((identity or FolderIdentity(path, adapter)).of, files)
    profile = _kept_profile(opened.layers, lambda: identify().digest) if warm and opened.layers else None
    if profile is not None:
        opened = replace(opened, layers=profile.with_hit_rates(opened.layers))
    bound = None if opened.kv_choice.endless else opened.model_context
    context = _asked_context(path, bound, context)
    plan, tuning = _divide_as_tuned(
        opened,
        tuning,
        experts=experts,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        context=context,
        chunk_tokens=chunk_tokens,
    )
    tuned = tuning is not None and tuning.context is not None
    if context is None and plan.context != bound and not tuned:
        logger.warning(
            "%s was made for %s tokens of context; %s fit the memory beside its experts. Set context= to choose.",
            path.name, bound, plan.context,
        )  # fmt: skip
    cache = ExpertCache(
        opened.modules,
        opened.layers,
        lambda: locate_experts(opened.model, opened.modules, opened.checkpoint),
        ExpertReader(opened.checkpoint.files),
    )
    try:
        cache.start_streaming(plan.slots)
        cache.look_ahead(opened.model, lookahead)
        banks = {id(array) for stream in cache.streams.values() for array in stream.bank.arrays.values()}
        trunk = [array for array in Tree.of(opened.model).arrays if id(array) not in banks]
        trunk_bytes = sum(array.nbytes for array in trunk)
        total = trunk_bytes + (cache.unfilled_bytes if warm else 0)
        with _beside(partial(_load_tokenizer, path, opened.config, trust_remote_code)) as tokenizer:

            def tell(done: int) -> None:
                if tokenizer.done():
                    tokenizer.result()  # raises what is wrong with it, before the rest is read
                if progress is not None:
                    progress("load", done, total)

            read_weights(trunk, path, tell)
            if warm and cache.streams:
                cache.fill(profile, lambda done: tell(trunk_bytes + done))
    except BaseException:
        cache.close()
        raise
    return LoadedModel(
        model=opened.model,
        tokenizer=tokenizer.result(),
        config=opened.config,
        path=path,
        vocab_size=opened.vocab_size,
        plan=plan,
        kv=opened.kv,
        kv_choice=opened.kv_choice,
        experts=cache,
        identify=identify,
        tuning=tuning,
    )


@contextmanager
def _beside(work: Callable[[], TokenizerWrapper]) -> Iterator[Future[TokenizerWrapper]]:
    """`work` in a thread of its own, which is done when this context ends: reading weights needs no Python.

    In this thread, before anything else, where there is no other to be had.
    """
    with ThreadPoolExecutor(1, "mlxmoe-tokenizer") as threads:
        try:
            threads.submit(bool).result()  # a thread that has just started would keep Python from this one
            doing = threads.submit(work)
        except RuntimeError as error:
            logger.info("The tokenizer is loaded before the weights: %s", error)
            doing = Future()
            doing.set_result(work())
        yield doing
        doing.result()


def _divide_as_tuned(opened: OpenedModel, tuning: Tuning | None, **asked: Any) -> tuple[Plan, Tuning | None]:
    """The plan with what `tuning` says where nothing was `asked`, and the tuning if it was used.

    The machine may have less to give than when it was tuned: then with the experts that fit, and at last without it.
    """
    with PrefillRoom(opened) as room:
        if tuning is not None:
            free = [name for name, value in asked.items() if value in (None, "auto")]
            said: dict[str, Any] = {name: value for name, value in tuning.arguments.items() if name in free}
            for choice in ([said] if "experts" in said else []) + [{**said, "experts": asked["experts"]}]:
                try:
                    return divide_memory(opened, room, **{**asked, **choice}), tuning
                except MemoryBudgetError as error:
                    logger.info("The tuning does not fit now with %s: %s", choice, error)
        return divide_memory(opened, room, **asked), None


def _asked_context(path: Path, model_context: int | None, asked: int | None) -> int | None:
    if asked is None:
        return None
    if not isinstance(asked, int) or isinstance(asked, bool) or asked < 2:
        raise MemoryBudgetError(f"context={asked!r} is no number of tokens: at least 2, for a prompt and a reply.")
    if model_context is not None and asked > model_context:
        warnings.warn(
            f"context={asked}: {path.name} was made for {model_context} tokens and may lose the thread beyond them.",
            stacklevel=4,
        )
    return asked


def _kept_profile(layers: Sequence[MoeLayer], digest: Callable[[], str]) -> RoutingProfile | None:
    """`digest`: of the model's content."""
    try:
        return ProfileFolder().find(layers, digest)
    except RequestError as error:
        logger.info("No routing profile: %s", error)
        return None


def _load_tokenizer(path: Path, config: dict[str, Any], trust: bool) -> TokenizerWrapper:
    try:
        return load_tokenizer(path, {"trust_remote_code": trust}, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:  # many libraries' errors; all mean the same to the user
        raise ModelError(f"The tokenizer of {path} cannot be loaded: {brief(error)}") from error
