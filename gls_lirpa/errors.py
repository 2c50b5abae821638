"""Errors whose message is meant for the user: one line saying what was wrong and what to do."""

from __future__ import annotations


class GLSError(Exception):
    """Base of every error this package raises on purpose; the CLI prints its message alone."""


class ConfigError(GLSError):
    """A name, option or configuration value that cannot be used."""


class UnknownNameError(ConfigError):
    """A name that no table of methods, networks or datasets has."""


class DataError(GLSError):
    """Missing, empty or malformed data."""


class CheckpointError(GLSError):
    """A run folder or weight file that cannot be read, or belongs to another network."""


class EngineError(GLSError):
    """auto_LiRPA is missing or unusable, or cannot do what was asked."""


class UnsupportedLayerError(EngineError):
    """The network contains an operation that the chosen relaxation cannot bound."""


class NumericalError(GLSError):
    """NaN or infinity where a finite number is needed."""


class ContradictionError(GLSError):
    """A sample was both verified and attacked: some bound or attack is wrong."""
