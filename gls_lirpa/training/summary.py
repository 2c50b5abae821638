"""What is left after a run: a summary a script can read and a picture of the training curve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gls_lirpa.base.figures import can_draw, curve_look, new_figure, save_figure
from gls_lirpa.models import count_parameters
from gls_lirpa.training.runs import RunFolder
from gls_lirpa.training.trainer import Trainer


def write_summary(trainer: Trainer, out: Path) -> dict[str, Any]:
    """Write ``summary.json`` and ``curve.png`` of a ``trainer``'s run into its folder ``out``; returns the summary."""
    folder = RunFolder(out)
    rows = folder.metrics()
    config = trainer.config
    last = rows[-1] if rows else {}
    summary = {
        "method": config.method,
        "dataset": config.dataset,
        "net": config.net,
        "parameters": count_parameters(trainer.model),
        "eps": config.eps,
        "preset": config.preset,
        "seed": config.seed,
        "epochs": len(rows),
        "seconds": sum(row["seconds"] for row in rows),
        "loss": last.get("loss"),
        "held_out": last.get("held_out"),
        "natural": last.get("natural"),
        "certified": last.get("certified"),
    }
    folder.write_json("summary.json", summary)
    if rows and can_draw():
        draw_curve(
            rows, out / "curve.png", title=f"{config.method} · {config.net} · {config.dataset} · ε={config.eps:.4g}"
        )
    return summary


def draw_curve(rows: list[dict[str, Any]], file: Path, *, title: str) -> None:
    """Loss and ε above, held-out accuracies below, over epochs."""
    epochs = [row["epoch"] for row in rows]
    figure = new_figure(7, 5)
    upper, lower = figure.subplots(2, 1, sharex=True)
    upper.set_title(title, fontsize=10)
    upper.plot(epochs, [row["loss"] for row in rows], label="training loss", **curve_look(0, len(rows)))
    upper.set_ylabel("training loss")
    radius = upper.twinx()
    radius.plot(epochs, [row["eps"] for row in rows], "k:", label="ε")
    radius.set_ylabel("ε (dotted)")
    for index, name in enumerate(("natural", "certified")):
        lower.plot(epochs, [row[name] for row in rows], label=name, **curve_look(index, len(rows)))
    lower.set_ylabel(f"accuracy on {rows[-1]['held_out']} [%]")
    lower.set_xlabel("epoch")
    lower.set_ylim(0, 100)
    lower.legend(loc="lower right")
    lower.grid(alpha=0.3)
    save_figure(figure, file, dpi=120)
