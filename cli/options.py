"""Option types shared by the commands."""

from __future__ import annotations

import copy
from fractions import Fraction
from pathlib import Path
from typing import Any

import click


class Radius(click.ParamType):
    """A number or a fraction such as 2/255."""

    name = "radius"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return float(Fraction(value)) if "/" in value else float(value)
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} is not a number or a fraction such as 2/255", param, ctx)


class Numbers(click.ParamType):
    """Comma-separated numbers."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(float(part) for part in value.split(",") if part.strip())
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers such as 50,60", param, ctx)


class Assignment(click.ParamType):
    """NAME=VALUE."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        key, equals, text = value.partition("=")
        if not equals or not key.strip() or not text.strip():
            self.fail(f"{value!r} is not of the form name=value", param, ctx)
        return key.strip().replace("-", "_"), text.strip()


class MethodCommand(click.Command):
    """A command whose help, and with ``method_options`` (all, or switches alone) whose options, come from the tables of
    methods.

    Plugins are run before the options are read, so that their methods are among them. ``{losses}`` and the like in
    help texts stand for the names in the tables.
    """

    def __init__(self, *args: Any, method_options: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._method_options = method_options
        self._written = tuple(self.params)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # The tables come with torch, a second or more: a command that names none of them answers without.
        if plugins := _plugins(args):
            from gls_lirpa.base.user_code import load_plugins

            load_plugins(plugins)
        if self._method_options or any("{" in (getattr(param, "help", None) or "") for param in self._written):
            self._read_tables()
        return super().parse_args(ctx, args)

    def _read_tables(self) -> None:
        from gls_lirpa.jobs.options import method_options, names_for_help

        names = names_for_help()
        self.params = [_with_names(param, names) for param in self._written]
        if self._method_options:
            taken = {flag for param in self.params for flag in param.opts}
            only = bool if self._method_options == "switches" else None
            self.params += [_click_option(option) for option in method_options(taken, only=only)]
            self.epilog = names["option_table"]

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for line in (self.epilog or "").splitlines():
            formatter.write_text(line)


def _with_names(param: click.Parameter, names: dict[str, str]) -> click.Parameter:
    if not isinstance(param, click.Option) or not param.help:
        return param
    filled = copy.copy(param)
    filled.help = param.help.format(**names)
    return filled


def _click_option(option: Any) -> click.Option:
    flag = option.flag if option.kind is not bool else f"{option.flag}/--no-{option.flag[2:]}"
    kind = {} if option.kind is bool else {"type": option.kind}
    return click.Option([flag], default=None, help=option.help, **kind)


def _plugins(args: list[str]) -> list[str]:
    following = [args[i + 1] for i, argument in enumerate(args[:-1]) if argument == "--plugin"]
    return following + [argument.partition("=")[2] for argument in args if argument.startswith("--plugin=")]


def plugin_option(function: Any) -> Any:
    """``--plugin``, which has done its work by the time the command runs."""
    return click.option(
        "--plugin",
        type=click.Path(path_type=Path),
        multiple=True,
        expose_value=False,
        help="Run this Python file first, which registers losses, relaxations or estimators.",
    )(function)
