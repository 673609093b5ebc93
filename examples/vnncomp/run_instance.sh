#!/bin/sh
# VNN-COMP's interface: run_instance.sh v1 CATEGORY ONNX VNNLIB RESULTS TIMEOUT. Writes the verdict and a witness.
set -eu
[ "${1-}" = v1 ] && [ $# -eq 6 ] || {
    echo "run_instance.sh: got '$*', expected v1 CATEGORY ONNX VNNLIB RESULTS TIMEOUT" >&2
    exit 1
}
shift
exec "${TRIVET:-$(dirname "$0")/../../.venv/bin/trivet}" vnncomp run "$@"
