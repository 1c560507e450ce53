"""The whole error tree, by who must act.

MillpondError
├─ ConfigError            the configuration's fault: what was found, what was expected
├─ RequestError           the caller's fault: ends that request and names its id
│  ├─ EmptyPrompt · ContextExceeded · InvalidParameter · QueueFull · RequestFailed
│  ├─ UnknownModel · PoolBusy · KvMemoryExceeded · DeadlineExceeded
├─ CodecError             the bytes' fault: quarantine, count, miss
│  ├─ DescriptorError · GgufError · BlockError · KvRangeError
├─ SpillError             the machine's fault: spilling latches off, serving goes on
│  ├─ SpillFailed · SpillFull
├─ ModelError             a model that cannot load ends the start of its house
│  ├─ ModelNotFound · ModelUnreadable · UnsupportedModel · TokenizerError · ChatTemplateError
│  ├─ ModelUnavailable · ModelTooLarge
└─ EngineError            the pinned thread is gone: fails its pending requests, health is red
   ├─ EngineStalled · EngineDied · HouseStuck · RuntimeClosed
"""

from __future__ import annotations

from millpond.codecs.errors import CodecError, DescriptorError, GgufError, MillpondError

__all__ = [
    "BlockError",
    "ChatTemplateError",
    "CodecError",
    "ConfigError",
    "ContextExceeded",
    "DeadlineExceeded",
    "DescriptorError",
    "EmptyPrompt",
    "EngineDied",
    "EngineError",
    "EngineStalled",
    "GgufError",
    "HouseStuck",
    "InvalidParameter",
    "KvMemoryExceeded",
    "KvRangeError",
    "MillpondError",
    "ModelError",
    "ModelNotFound",
    "ModelTooLarge",
    "ModelUnavailable",
    "ModelUnreadable",
    "PoolBusy",
    "QueueFull",
    "RequestError",
    "RequestFailed",
    "RuntimeClosed",
    "SpillError",
    "SpillFailed",
    "SpillFull",
    "TokenizerError",
    "UnknownModel",
    "UnsupportedModel",
]


class ConfigError(MillpondError):
    """A configuration that cannot be served; the message gives field, found and expected."""


class RequestError(MillpondError):
    """The caller's fault; ends one request.

    request_id  the request, or None before it had one
    """

    def __init__(self, message: str, request_id: int | None = None) -> None:
        super().__init__(message if request_id is None else f"request {request_id}: {message}")
        self.request_id = request_id


class EmptyPrompt(RequestError):
    """A prompt without any token."""


class ContextExceeded(RequestError):
    """Prompt and completion do not fit the model's context."""


class InvalidParameter(RequestError):
    """A request parameter out of its range or of the wrong type."""


class QueueFull(RequestError):
    """As many requests as the configuration admits are in the house already."""


class KvMemoryExceeded(RequestError):
    """A request whose live cache might outgrow the whole memory budget for KV."""


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it ended; what it had computed stays cached."""


class UnknownModel(RequestError):
    """No model of this name is served; the message lists those that are."""


class PoolBusy(RequestError):
    """No room for another model within the time that a request may wait for one."""


class RequestFailed(RequestError):
    """The engine could not finish this request; the message says why."""


class BlockError(CodecError):
    """A block file that is not what its name promises; its reason is a miss reason.

    reason  ``corrupt`` or ``mismatch``
    """

    def __init__(self, message: str, reason: str = "corrupt") -> None:
        super().__init__(message)
        self.reason = reason


class KvRangeError(CodecError):
    """Positions that a dense cache does not hold, or has no room for."""


class SpillError(MillpondError):
    """The spill root's fault; never ends a request."""


class SpillFailed(SpillError):
    """A file operation failed: which, on what, and what the system said."""

    def __init__(self, operation: str, subject: str, error: OSError) -> None:
        super().__init__(f"{operation} {subject}: {error.strerror or error}")
        self.operation, self.subject, self.errno = operation, subject, error.errno


class SpillFull(SpillError):
    """The budget, or the free space that must stay, leaves no room."""


class ModelError(MillpondError):
    """A model that cannot be loaded; fails its own house only."""


class ModelNotFound(ModelError):
    """No such model file, or not a regular file."""


class ModelUnreadable(ModelError):
    """The file is no valid GGUF, or could not be read to its end."""


class UnsupportedModel(ModelError):
    """A valid GGUF that millpond cannot serve; the message says why and what is supported."""


class ModelTooLarge(ModelError):
    """The weights would take more memory than the configuration allows."""


class ModelUnavailable(ModelError):
    """A model of a pool that could not be loaded, or whose house ended; the message says why."""


class TokenizerError(ModelError):
    """The file's vocabulary is missing or broken."""


class ChatTemplateError(ModelError):
    """There is no chat template, or it failed, or it ran past its bound."""


class EngineError(MillpondError):
    """The pinned thread cannot serve any more."""


class EngineStalled(EngineError):
    """A call on a thread ran longer than its limit."""


class EngineDied(EngineError):
    """The thread ended with an exception or vanished."""


class HouseStuck(EngineError):
    """Nothing happens in a house although requests are in it: a mistake of ours; it is closed."""


class RuntimeClosed(EngineError):
    """The runtime is closing or closed."""
