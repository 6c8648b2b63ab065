"""Mixture-of-Experts language models, also larger than the machine's memory, with the words of the whole model.

from mlxmoe import load

llm = load("mlx-community/Qwen3-30B-A3B-4bit")  # or a folder; load() alone is the built-in demo model
for chunk in llm.stream("Why is the sky blue?"):
    print(chunk, end="", flush=True)
"""

from mlxmoe.engine import Engine
from mlxmoe.errors import (
    CheckpointError,
    CheckpointReadError,
    ContextError,
    DownloadError,
    EngineClosedError,
    MemoryBudgetError,
    MemoryPressureError,
    MlxMoeError,
    ModelError,
    ModelNotFoundError,
    PlanError,
    PromptError,
    QueueFullError,
    RequestError,
    SamplingError,
    SavedStateError,
    TornStateError,
    UnsupportedModelError,
    WindowError,
)
from mlxmoe.experts.recording import Recording
from mlxmoe.experts.routing import LayerRouting, RoutingStats, routing_stats
from mlxmoe.experts.trace import Trace
from mlxmoe.kv.prefix import PrefixStats, PrefixStore
from mlxmoe.kv.settings import KVSettings
from mlxmoe.memory.guard import MemoryEvent
from mlxmoe.memory.plan import Plan
from mlxmoe.memory.reading import Reading
from mlxmoe.registry import register
from mlxmoe.reply import Chunk
from mlxmoe.session import Session
from mlxmoe.starting import load
from mlxmoe.stats import EngineStats, LayerStats, MemoryUse
from mlxmoe.tuned import TunedMachine
from mlxmoe.tuning import ContextPlan, PlanReport, PrefillRow, TogetherPlan, TuneReport, TuneRow, plan, tune
from mlxmoe.version import __version__

__all__ = [
    "CheckpointError",
    "CheckpointReadError",
    "Chunk",
    "ContextError",
    "ContextPlan",
    "DownloadError",
    "Engine",
    "EngineClosedError",
    "EngineStats",
    "KVSettings",
    "LayerRouting",
    "LayerStats",
    "MemoryBudgetError",
    "MemoryEvent",
    "MemoryPressureError",
    "MemoryUse",
    "MlxMoeError",
    "ModelError",
    "ModelNotFoundError",
    "Plan",
    "PlanError",
    "PlanReport",
    "PrefillRow",
    "PrefixStats",
    "PrefixStore",
    "PromptError",
    "QueueFullError",
    "Reading",
    "Recording",
    "RequestError",
    "RoutingStats",
    "SamplingError",
    "SavedStateError",
    "Session",
    "TogetherPlan",
    "TornStateError",
    "Trace",
    "TuneReport",
    "TuneRow",
    "TunedMachine",
    "UnsupportedModelError",
    "WindowError",
    "__version__",
    "load",
    "plan",
    "register",
    "routing_stats",
    "tune",
]
