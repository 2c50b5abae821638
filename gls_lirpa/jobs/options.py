"""What the command line says about methods, read from their tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gls_lirpa.base.options import Option, Options
from gls_lirpa.base.registry import Registry
from gls_lirpa.certification import DEFAULT_STAGES, STAGES
from gls_lirpa.data import DATASETS
from gls_lirpa.errors import ConfigError
from gls_lirpa.estimators import ESTIMATORS
from gls_lirpa.losses import LOSSES
from gls_lirpa.models import INITIALIZERS, MODELS
from gls_lirpa.relaxations import RELAXATIONS, ball_relaxations
from gls_lirpa.training.job import estimator_options
from gls_lirpa.training.logs import LOGS
from gls_lirpa.training.presets import PRESETS
from gls_lirpa.training.schedules import SHAPES


@dataclass(frozen=True)
class CommandOption:
    """A flag of the command line."""

    flag: str
    kind: type[bool] | type[int] | type[float]
    help: str


def method_options(taken: set[str], *, only: type | None = None) -> list[CommandOption]:
    """A flag for each option of an estimator, or each of ``only`` one kind; ``taken``: those that the command has.

    >>> [option.flag for option in method_options(set())][:2]
    ['--sigma', '--population']
    >>> [option.flag for option in method_options(set(), only=bool)]
    ['--split', '--relative', '--antithetic']
    """
    found = []
    for name, users in estimator_options().items():
        options = [ESTIMATORS.get(user).options[name] for user in users]
        if only not in (None, options[0].kind):
            continue
        flag = f"--{name.replace('_', '-')}"
        if flag in taken or len({option.kind for option in options}) > 1:
            raise ConfigError(f"option {name!r} of estimator {users[-1]!r} means something else in this command")
        found.append(CommandOption(flag, options[0].kind, f"{_described(options[0])} ({', '.join(users)})."))
    return found


def names_for_help() -> dict[str, str]:
    """What stands for ``{losses}`` and the like in help texts."""

    def which(table: Registry[Any], flag: str) -> str:
        return " or ".join(name for name in table if getattr(table.get(name), flag))

    return {
        "datasets": DATASETS.named(),
        "nets": MODELS.named(),
        "losses": LOSSES.named(),
        "relaxations": RELAXATIONS.named(alias=True),
        "estimators": ESTIMATORS.named(),
        "presets": ", ".join(PRESETS),
        "inits": INITIALIZERS.named(),
        "shapes": ", ".join(SHAPES),
        "stages": STAGES.named(),
        "logs": LOGS.named(),
        "ball_losses": which(LOSSES, "balls"),
        "ball_relaxations": ", ".join(ball_relaxations()),
        "learners": which(LOSSES, "teacher"),
        "decaying": which(ESTIMATORS, "decays"),
        "pooled": which(ESTIMATORS, "uses_actors"),
        "default_stages": ",".join(DEFAULT_STAGES),
        "option_table": _option_table(),
    }


def _option_table() -> str:
    lines = ["Estimators:", *(f"  {name}: {ESTIMATORS.get(name).help}" for name in ESTIMATORS)]
    lines += ["Losses, and their options for --set:"]
    lines += [line for name in LOSSES for line in _lines(name, LOSSES.get(name).help, LOSSES.get(name).options)]
    lines += ["Relaxations, and their options for --set:"]
    for name in RELAXATIONS:
        lines += _lines(name, RELAXATIONS.get(name).help, RELAXATIONS.get(name).options)
    return "\n".join(lines)


def _lines(name: str, text: str, options: Options) -> list[str]:
    return [f"  {name}: {text}", *(f"    {key}: {_described(option)}" for key, option in options.items())]


def _described(option: Option) -> str:
    text = f"{option.help[:1].upper()}{option.help[1:]}"
    if option.default is None or option.default is False:
        return text
    return f"{text}, by default {'yes' if option.default is True else format(option.default, 'g')}"
