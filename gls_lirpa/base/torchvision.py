"""torchvision, also where its compiled part does not fit the torch beside it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch


def repair_torchvision() -> None:
    """Let torchvision import where its compiled operators cannot load (its wheel beside a CPU torch).

    Its Python part registers fake kernels for two operators; declaring their schemas is enough for
    datasets and transforms.
    """
    try:
        importlib.import_module("torchvision")
        return
    except ImportError:
        return
    except RuntimeError:
        for name in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[name]
    library: Any = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT_LIBRARIES.append(library)
    importlib.import_module("torchvision")


# A torch.library.Library takes its schemas with it when it is collected.
_KEPT_LIBRARIES: list[torch.library.Library] = []
