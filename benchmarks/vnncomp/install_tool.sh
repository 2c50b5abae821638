#!/bin/bash
# VNN-COMP, once per machine: install_tool.sh v1
# Makes .venv in the clone with the pinned versions of constraints.txt.
set -eu
if [ "${1:-}" != v1 ]; then
    echo "usage: install_tool.sh v1" >&2
    exit 1
fi
make -C "$(dirname "$(readlink -f "$0")")/../.." setup
