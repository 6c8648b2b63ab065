"""Mixture-of-Experts language models, also larger than the machine's memory, with the words of the whole model.

from mlxmoe import load

llm = load("mlx-community/Qwen3-30B-A3B-4bit")  # or a folder; load() alone is the built-in demo model
for chunk in llm.stream("Why is the sky blue?"):
    print(chunk, end="", flush=True)
"""

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
from mlxmoe.version import __version__

TYPE_CHECKING = False  # typing's takes longer to import than all of this; type checkers know the name
if TYPE_CHECKING:  # for type checkers and editors; for Python the same in the table below
    from mlxmoe.engine import Engine
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

# Where a name lives that takes MLX, mlx-lm or NumPy: its module is imported when the name is first asked for.
_HOMES = {
    "Chunk": "mlxmoe.reply",
    "ContextPlan": "mlxmoe.tuning",
    "Engine": "mlxmoe.engine",
    "EngineStats": "mlxmoe.stats",
    "KVSettings": "mlxmoe.kv.settings",
    "LayerRouting": "mlxmoe.experts.routing",
    "LayerStats": "mlxmoe.stats",
    "MemoryEvent": "mlxmoe.memory.guard",
    "MemoryUse": "mlxmoe.stats",
    "Plan": "mlxmoe.memory.plan",
    "PlanReport": "mlxmoe.tuning",
    "PrefillRow": "mlxmoe.tuning",
    "PrefixStats": "mlxmoe.kv.prefix",
    "PrefixStore": "mlxmoe.kv.prefix",
    "Reading": "mlxmoe.memory.reading",
    "Recording": "mlxmoe.experts.recording",
    "RoutingStats": "mlxmoe.experts.routing",
    "Session": "mlxmoe.session",
    "TogetherPlan": "mlxmoe.tuning",
    "Trace": "mlxmoe.experts.trace",
    "TuneReport": "mlxmoe.tuning",
    "TuneRow": "mlxmoe.tuning",
    "TunedMachine": "mlxmoe.tuned",
    "load": "mlxmoe.starting",
    "plan": "mlxmoe.tuning",
    "register": "mlxmoe.registry",
    "routing_stats": "mlxmoe.experts.routing",
    "tune": "mlxmoe.tuning",
}

if not TYPE_CHECKING:  # who sees this would take any name for a public one

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = globals()[name] = getattr(import_module(_HOMES[name]), name)
        return value

    def __dir__() -> list[str]:
        return list(__all__)
