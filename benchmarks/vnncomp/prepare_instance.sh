#!/bin/bash
# VNN-COMP, before each instance: prepare_instance.sh v1 CATEGORY ONNX VNNLIB
# Nothing is computed ahead; a non-zero status skips an instance whose files are missing.
set -eu
if [ "$#" -ne 4 ] || [ "$1" != v1 ]; then
    echo "usage: prepare_instance.sh v1 CATEGORY ONNX VNNLIB" >&2
    exit 1
fi
for file in "$3" "$4"; do
    if [ ! -r "$file" ] && [ ! -r "$file.gz" ]; then
        echo "$file cannot be read" >&2
        exit 1
    fi
done
