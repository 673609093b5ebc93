#!/bin/sh
# VNN-COMP's interface: prepare_instance.sh v1 CATEGORY ONNX VNNLIB. Fails for files that cannot be read.
set -eu
[ "${1-}" = v1 ] && [ $# -eq 4 ] || { echo "prepare_instance.sh: got '$*', expected v1 CATEGORY ONNX VNNLIB" >&2; exit 1; }
shift
exec "${TRIVET:-$(dirname "$0")/../../.venv/bin/trivet}" vnncomp prepare "$@"
