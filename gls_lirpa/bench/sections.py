"""What a report is made of: sections of paragraphs, tables and figures, as text for three formats."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Entry:
    """One cell of a table; ``mark`` is empty, best, second or failed."""

    text: str
    mark: str = ""


@dataclass(frozen=True)
class Table:
    """A heading line and rows of entries; the first ``labels`` columns are text."""

    name: str
    header: tuple[str, ...]
    rows: tuple[tuple[Entry, ...], ...]
    labels: int = 1
    note: str = ""

    def markdown(self) -> str:
        """The table as GitHub Markdown.

        >>> print(Table("t", ("a", "b"), ((Entry("x"), Entry("1", "best")),)).markdown())
        | a | b |
        |:--|--:|
        | x | **1** |
        """
        align = [":--" if column < self.labels else "--:" for column in range(len(self.header))]
        lines = ["| " + " | ".join(self.header) + " |", "|" + "|".join(align) + "|"]
        lines += ["| " + " | ".join(_marked(entry) for entry in row) + " |" for row in self.rows]
        return "\n".join([*lines, "", self.note] if self.note else lines)

    def csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows([[entry.text for entry in row] for row in self.rows])
        return text.getvalue()


@dataclass(frozen=True)
class Figure:
    """A picture file beside the report, with what it shows."""

    file: Path
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, then tables, then figures."""

    title: str
    paragraphs: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = field(default=())


def _marked(entry: Entry) -> str:
    text = entry.text.replace("|", "\\|")
    return {"best": f"**{text}**", "second": f"_{text}_", "failed": f"⚠ {text}"}.get(entry.mark, text)


def marks(values: Sequence[float | None]) -> list[str]:
    """Best and second among some numbers, larger is better; equals share a mark.

    >>> marks([1.0, 3.0, None, 2.0])
    ['', 'best', '', 'second']
    """
    found = sorted({value for value in values if value is not None}, reverse=True)
    names = dict(zip(found, ("best", "second"), strict=False)) if len(found) > 1 else {}
    return [names.get(value, "") if value is not None else "" for value in values]
