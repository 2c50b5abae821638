"""Recompute every table and interval of RESULTS.md that comes from result files.

    python benchmarks/tables.py            rewrite the blocks
    python benchmarks/tables.py --check    only say whether they are up to date (exit code 1 if not)
"""

from __future__ import annotations

import sys
from pathlib import Path

from gls_lirpa.bench.evidence import update_page

HERE = Path(__file__).resolve().parent


def main() -> int:
    check = "--check" in sys.argv[1:]
    same = update_page(HERE / "RESULTS.md", HERE / "results", check=check)
    print("RESULTS.md is up to date" if same else "RESULTS.md is out of date" if check else "RESULTS.md rewritten")
    return int(check and not same)


if __name__ == "__main__":
    sys.exit(main())
