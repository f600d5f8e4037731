"""The errors a caller can tell apart, each with the code it carries on the wire.

A message names what was wrong, the limit, and what was received. Impossible situations
inside a stage are asserts, not errors of this tree.
"""

from __future__ import annotations


class TTSError(Exception):
    """Base of everything refused on purpose. `code` is the wire code; `retryable` is for programs."""

    code = "engine_error"
    retryable = False
    retry_after_ms: int | None = None

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code


class BadRequest(TTSError):
    """The request itself can't be served: sending it again will not help."""

    code = "invalid_param"


class Unauthorized(TTSError):
    """A token is required and was missing or wrong."""

    code = "unauthorized"


class Overloaded(TTSError):
    """No capacity within the first-audio budget."""

    code = "overloaded"
    retryable = True

    def __init__(self, message: str, *, retry_after_ms: int = 1000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Draining(TTSError):
    """The server is about to stop and takes nothing new."""

    code = "draining"
    retryable = True
    retry_after_ms = 1000


class SlowClient(TTSError):
    """The client left its audio unread for too long."""

    code = "slow_consumer"


class IdleTimeout(TTSError):
    """Nothing was said or heard on a connection for too long."""

    code = "idle_timeout"
    retryable = True


class StageFailed(TTSError):
    """A stage raised; the cause is in the log and is never sent."""

    code = "engine_error"
    retryable = True


class ConfigError(TTSError):
    """Start-up only: the configuration can't be used."""

    code = "config"


class ModelError(TTSError):
    """Start-up only: the model folder can't be used."""

    code = "model"
