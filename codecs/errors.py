"""The root of the error tree and the errors of bytes; ``runtime.errors`` shows the whole tree."""

from __future__ import annotations


class MillpondError(Exception):
    """Every error that millpond raises on purpose."""


class CodecError(MillpondError):
    """The bytes' fault: whatever was read is not what its format demands."""


class DescriptorError(CodecError):
    """A descriptor that is not consistent in itself, or does not fit its consumer."""


class GgufError(CodecError):
    """A GGUF file that breaks its format; the message gives found and expected."""
