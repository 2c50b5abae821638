from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from gls_lirpa.errors import ConfigError
from gls_lirpa.models import load_user_model

CIFAR_MEAN, CIFAR_STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


def _write(folder: Path, text: str) -> Path:
    file = folder / "net.py"
    file.write_text("import torch\nfrom torch import nn\n" + text)
    return file


def test_user_model_gets_what_its_factory_accepts(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_net.py").write_text("HIDDEN = 5\n")
    file = _write(
        tmp_path,
        "from neighbour_of_net import HIDDEN\n"
        "class Net(nn.Module):\n"
        "    def __init__(self, in_shape, *, classes=10, mean=None, depth=2):\n"
        "        super().__init__()\n"
        "        self.seen = (in_shape, classes, mean, depth)\n"
        "        self.fc = nn.Linear(12, HIDDEN); self.out = nn.Linear(HIDDEN, classes)\n"
        "    def forward(self, x): return self.out(self.fc(x.flatten(1)).relu())\n"
        "def everything(**kwargs): return Net(kwargs['in_shape'], classes=kwargs['classes'])\n",
    )
    torch.manual_seed(5)
    before = torch.get_rng_state()
    kwargs = {"in_shape": [3, 2, 2], "classes": 4, "mean": CIFAR_MEAN, "std": CIFAR_STD}
    model = load_user_model(f"{file}:Net", **kwargs, seed=1)  # type: ignore[arg-type]
    assert model.seen == ((3, 2, 2), 4, CIFAR_MEAN, 2)
    assert model.training and torch.equal(torch.get_rng_state(), before)
    again = load_user_model(f"{file}:everything", **kwargs, seed=1)  # type: ignore[arg-type]
    other = load_user_model(f"{file}:everything", **kwargs, seed=2)  # type: ignore[arg-type]
    x = torch.rand(2, 3, 2, 2)
    assert torch.equal(model(x), again(x)) and not torch.equal(model(x), other(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.parametrize(
    ("text", "factory", "message"),
    [
        ("def make(): return nn.Flatten()", "mak", "defines no 'mak'; did you mean 'make'"),
        ("make = 3", "make", "is a int, expected a function"),
        ("make = nn.Flatten()", "make", "is a Flatten, expected a function"),
        ("def make(): raise ValueError('no\\nway')", "make", "failed: ValueError: no$"),
        ("def make(): return 3", "make", "returned int, expected an nn.Module"),
        ("def make(width): return nn.Flatten()", "make", "requires width; it can be given in_shape, classes"),
        ("def make(): return nn.Flatten()", "make", r"gives \(2, 12\) for a batch of 2, expected \(2, 4\)"),
        ("def make(): return nn.Linear(7, 4)", "make", "cannot take images of shape.*RuntimeError"),
        ("import no_such_module_anywhere", "make", "cannot be run: ModuleNotFoundError"),
        ("def make(:", "make", "cannot be run: SyntaxError"),
        ("raise SystemExit(3)", "make", "cannot be run: SystemExit: 3"),
    ],
)
def test_bad_user_model(tmp_path: Path, text: str, factory: str, message: str) -> None:
    file = _write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_user_model(f"{file}:{factory}", in_shape=(3, 2, 2), classes=4)
    assert "\n" not in str(caught.value)


def test_user_model_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.py' does not exist"):
        load_user_model(f"{tmp_path / 'nothing.py'}:make", in_shape=(1, 2, 2), classes=2)
    for spec in ("net.py", "net.py:", ":make"):
        with pytest.raises(ConfigError, match=r"expected a network as path/to/file\.py:factory"):
            load_user_model(spec, in_shape=(1, 2, 2), classes=2)
    (tmp_path / "net.txt").write_text("")
    with pytest.raises(ConfigError, match="is not a Python file"):
        load_user_model(f"{tmp_path / 'net.txt'}:make", in_shape=(1, 2, 2), classes=2)
