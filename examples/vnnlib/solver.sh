#!/bin/sh
# The solver interface of VNN-LIB 2.0, as one program: --name, --version, supports and verify. Consents for its caller to
# bounds of real arithmetic where a query declares floating-point types.
set -eu
trivet="${TRIVET:-$(dirname "$0")/../../.venv/bin/trivet}"
if [ "${1-}" = verify ]; then
    shift
    exec "$trivet" vnnlib verify --as-real "$@"
fi
exec "$trivet" vnnlib "$@"
