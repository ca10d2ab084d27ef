"""Every error this package raises on purpose.

DFlashError
 +-- RequestError (ValueError)         a prompt or an option that cannot be served
 |    +-- PromptTooLong                the prompt does not fit the target's context
 |    +-- MissingPackage (ImportError) a package that is needed for it is not installed
 +-- ModelNotFound (FileNotFoundError) no such alias, folder, file or hub id
 +-- CheckpointError (ValueError)      weights missing, left over, misshapen or unreadable
 +-- ConfigError (ValueError)          a draft config that is incomplete, contradictory or unknown
 +-- IncompatibleDraft (ValueError)    a sound draft that was made for another target
 +-- UnsupportedTarget (ValueError)    a target whose caches we cannot roll back
 +-- ProcessLost                      another process of a training run has ended
 +-- NonFiniteScores (ArithmeticError) the target itself produced NaN
"""

from __future__ import annotations


class DFlashError(Exception):
    """Base of all errors of this package."""


class RequestError(DFlashError, ValueError):
    """A prompt or an option that cannot be served."""


class PromptTooLong(RequestError):
    """The prompt does not fit the target's context."""


class MissingPackage(RequestError, ImportError):
    """A package that is needed is not installed."""


class ModelNotFound(DFlashError, FileNotFoundError):
    """No such alias, folder, file or hub id."""


class CheckpointError(DFlashError, ValueError):
    """Weights missing, left over, misshapen or unreadable."""


class ConfigError(DFlashError, ValueError):
    """A draft config that is incomplete, contradictory or unknown."""


class IncompatibleDraft(DFlashError, ValueError):
    """A sound draft that was made for another target."""


class UnsupportedTarget(DFlashError, ValueError):
    """A target whose caches we cannot roll back."""


class ProcessLost(DFlashError):
    """Of several processes that train together another one has ended, so nothing can be exchanged with it any more."""


class NonFiniteScores(DFlashError, ArithmeticError):
    """The target itself produced NaN scores."""


def one_line(error: Exception) -> str:
    """What an error of another library says, as a part of a sentence of ours."""
    return " ".join(str(error).split()) or type(error).__name__
