"""Every error this library raises on purpose. Knows nothing else.

    MlxMoeError
    ├── ModelError                  the model cannot be used as it stands
    │   ├── ModelNotFoundError        no such folder or hub id, or not a model folder
    │   ├── UnsupportedModelError     a model type or a checkpoint layout that is not handled
    │   └── CheckpointError           files missing, truncated or not what the config says
    │       └── CheckpointReadError     a read failed, or a file changed, while running
    ├── DownloadError               the hub is out of reach, or the disk too small
    ├── MemoryBudgetError           experts, context and memory do not fit together
    ├── MemoryPressureError         the machine is short of memory right now
    ├── QueueFullError              the server has as much to do as it takes on
    ├── RequestError                what was asked makes no sense
    │   ├── PromptError               an empty, too long or malformed prompt
    │   │   └── ContextError            prompt and reply are longer than the context
    │   ├── SamplingError             a sampling value outside its range
    │   ├── WindowError               a window, sinks or kv_bits that make no sense
    │   └── PlanError                 a chip, a rate or bits that nothing can be predicted from
    ├── SavedStateError             a saved session cannot be written, or is of another model or version
    │   └── TornStateError            a file that is no whole saved state
    └── EngineClosedError           the engine was closed

A message says what was asked, what stood in the way with its numbers, and what to do next.
"""

from __future__ import annotations


def brief(error: Exception) -> str:
    """Another library's message on one line, cut where it runs on; its type where it says nothing."""
    text = " ".join(str(error).split())
    return (text if len(text) <= 400 else text[:400] + " ...") or type(error).__name__


class MlxMoeError(Exception):
    """Base of all errors that mlxmoe raises on purpose."""


class ModelError(MlxMoeError):
    """The model cannot be used as it stands."""


class ModelNotFoundError(ModelError):
    """No such folder or hub id, or the folder holds no model."""


class UnsupportedModelError(ModelError):
    """A model type, or a layout of its checkpoint, that is not handled."""


class CheckpointError(ModelError):
    """A checkpoint's files are missing, truncated, or not what its config says."""


class CheckpointReadError(CheckpointError):
    """A read failed, or a file changed, while the model was running."""


class DownloadError(MlxMoeError):
    """The hub is out of reach, refuses, or the disk is too small."""


class MemoryBudgetError(MlxMoeError):
    """The asked experts, context and memory do not fit together."""


class MemoryPressureError(MlxMoeError):
    """The machine is so short of memory that nothing new is begun; it may pass."""


class QueueFullError(MlxMoeError):
    """As many requests wait as the server takes on. `retry_after_s`: when it is worth asking again."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(MlxMoeError):
    """What was asked makes no sense."""


class PromptError(RequestError):
    """An empty, too long or malformed prompt."""


class ContextError(PromptError):
    """A prompt, or a prompt with its reply, that is longer than the context."""


class SamplingError(RequestError):
    """A sampling value outside its range."""


class WindowError(RequestError):
    """A window, sinks or kv_bits that make no sense."""


class PlanError(RequestError):
    """A chip that is not in the table, or a rate or bits from which nothing can be predicted."""


class SavedStateError(MlxMoeError):
    """A saved session or state cannot be written, or is torn, of another model or of another version."""


class TornStateError(SavedStateError):
    """A file that is no whole saved state: cut, altered, or never one."""


class EngineClosedError(MlxMoeError):
    """The engine was closed; load the model again."""
