"""Name tables: aliases, nearest names, no silent overwrite."""

from __future__ import annotations

import pytest

from gls_lirpa.base.registry import Registry, nearest
from gls_lirpa.errors import ConfigError


@pytest.fixture
def shapes() -> Registry[int]:
    registry: Registry[int] = Registry("shape")
    registry.register("triangle", 3)
    registry.register("square", 4, aliases=("quad", "box-4"))
    return registry


def test_lookup_ignores_case_blanks_and_underscores(shapes: Registry[int]) -> None:
    assert shapes.get("square") == shapes.get(" QUAD ") == shapes.get("Box_4") == 4
    assert shapes.canonical("quad") == "square"
    assert shapes.names() == list(shapes) == ["triangle", "square"]


def test_unknown_names_get_the_nearest_valid_one(shapes: Registry[int]) -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'sqare': expected one of triangle, square.*'square'\?"):
        shapes.get("sqare")
    with pytest.raises(ConfigError) as caught:
        shapes.get("zzz")
    assert "did you mean" not in str(caught.value)
    assert nearest("quat", ["quad"]) == "; did you mean 'quad'?"


@pytest.mark.parametrize("name, aliases", [("square", ()), ("quad", ()), ("new", ("square",)), ("new", ("quad",))])
def test_nothing_is_overwritten(shapes: Registry[int], name: str, aliases: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="already registered"):
        shapes.register(name, 9, aliases=aliases)
    assert shapes.get("square") == shapes.get("quad") == 4
    assert "new" not in shapes.names()
