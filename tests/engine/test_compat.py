"""auto_LiRPA missing, broken or present: one line with the cure, and no side effects."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from gls_lirpa.engine.compat import CURE, load_lirpa, versions

SCRIPT = """
import sys
from gls_lirpa.engine.compat import load_lirpa
from gls_lirpa.errors import EngineError
for folder in sys.argv[1:]:
    for name in [name for name in sys.modules if name.split(".")[0] == "auto_LiRPA"]:
        del sys.modules[name]
    if folder == "missing":
        sys.modules["auto_LiRPA"] = None
    else:
        sys.path.insert(0, folder)
    try:
        load_lirpa()
    except EngineError as error:
        print(error)
"""

STUBS = (
    "raise ImportError('no such symbol')",
    "raise RuntimeError('operator does not exist')",
    "__version__ = '9.9'",
    "class BoundedModule:\n    def compute_bounds(self): pass",
)


def test_unusable_auto_lirpa_names_the_cure(tmp_path: Path) -> None:
    folders = ["missing"]
    for number, stub in enumerate(STUBS):
        package = tmp_path / str(number) / "auto_LiRPA"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(stub)
        (package / "parse_graph.py").write_text("def parse_graph(graph): pass")
        folders.append(str(package.parent))
    command = [sys.executable, "-c", SCRIPT, *folders]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    missing, *unusable = done.stdout.strip().splitlines()
    assert len(unusable) == len(STUBS)
    assert missing.startswith("auto_LiRPA cannot be imported") and f"`{CURE}`" in missing
    for line in unusable:
        assert line.startswith("this auto_LiRPA cannot be used") and f"`{CURE}`" in line


def test_cure_installs_what_auto_lirpa_imports() -> None:
    assert "--no-deps auto_LiRPA==0.3" in CURE
    for package in ("appdirs", "tqdm", "graphviz"):
        assert package in CURE


def test_loading_leaves_logging_and_warnings_alone() -> None:
    handlers = logging.getLogger().handlers[:]
    lirpa = load_lirpa()
    assert lirpa is load_lirpa()
    assert logging.getLogger().handlers == handlers
    assert ("once", None, Warning, None, 0) not in warnings.filters
    assert lirpa.interm_key in ("interm_bounds", "intermediate_layer_bounds")


def test_repairs_keep_parameters_of_a_bounded_module_usable() -> None:
    bounded = load_lirpa().bounded_module(torch.nn.Linear(2, 2), torch.zeros(1, 2))
    assert len(list(bounded.parameters())) == 2


def test_versions_name_what_results_depend_on() -> None:
    found = versions()
    assert found["torch"].startswith(torch.__version__.split("+")[0])
    assert found["python"] == sys.version.split()[0]
