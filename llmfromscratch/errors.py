"""The package's own errors: each says what was wrong, where, and what to do about it."""

from __future__ import annotations

from pathlib import Path


class LLMFromScratchError(Exception):
    """Base of every error that this package raises on purpose."""


class CheckpointError(LLMFromScratchError):
    """A model file is missing, damaged, unsupported, or does not fit its config.

    reason: one sentence; file and tensor name the place, where there is one.
    """

    def __init__(self, reason: str, file: str | Path | None = None, tensor: str | None = None):
        self.reason, self.file, self.tensor = reason, file, tensor
        place = [str(file)] if file is not None else []
        if tensor is not None:
            place.append(f"tensor {tensor!r}")
        super().__init__(": ".join([*place, reason]))

    def __reduce__(self) -> tuple[type, tuple]:
        return type(self), (self.reason, self.file, self.tensor)


class TokenizerError(LLMFromScratchError):
    """A tokenizer file, a rule, a token id or a chat template cannot be used as asked."""


class RequestError(LLMFromScratchError):
    """A prompt or a parameter is wrong; nothing has been computed for it."""


class OutOfMemory(LLMFromScratchError):
    """A request needs more memory than its budget has; the message gives both numbers."""
