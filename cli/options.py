"""Option types shared by the commands."""

from __future__ import annotations

from fractions import Fraction
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
    """NAME=NUMBER."""

    name = "name=number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        key, _, number = value.partition("=")
        try:
            return key.strip().replace("-", "_"), int(number) if number.strip().isdigit() else float(number)
        except ValueError:
            self.fail(f"{value!r} is not of the form name=number", param, ctx)
