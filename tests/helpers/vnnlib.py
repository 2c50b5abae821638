"""Beginnings of VNN-LIB files."""

from __future__ import annotations


def declared(inputs: int, outputs: int) -> str:
    names = [f"X_{i}" for i in range(inputs)] + [f"Y_{j}" for j in range(outputs)]
    return "".join(f"(declare-const {name} Real)\n" for name in names)
