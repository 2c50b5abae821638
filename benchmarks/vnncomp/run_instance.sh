#!/bin/bash
# VNN-COMP, each instance: run_instance.sh v1 CATEGORY ONNX VNNLIB RESULT TIMEOUT
# RESULT gets unsat, sat with a counterexample below, unknown, timeout or error.
# GLSCERT_PYTHON names another Python than the one that install_tool.sh made.
set -u
if [ "$#" -ne 6 ] || [ "$1" != v1 ]; then
    echo "usage: run_instance.sh v1 CATEGORY ONNX VNNLIB RESULT TIMEOUT" >&2
    exit 1
fi
root="$(dirname "$(readlink -f "$0")")/../.."
python="${GLSCERT_PYTHON:-$root/.venv/bin/python}"
onnx="$3" vnnlib="$4" result="$5"
[ -r "$onnx" ] || [ ! -r "$onnx.gz" ] || onnx="$onnx.gz"
[ -r "$vnnlib" ] || [ ! -r "$vnnlib.gz" ] || vnnlib="$vnnlib.gz"
rm -f "$result"
"$python" -m glscert certify "$onnx" --vnnlib "$vnnlib" --timeout "$6" --result "$result"
status=$?
[ -s "$result" ] || echo error > "$result"
exit $status
