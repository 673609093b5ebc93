#!/bin/sh
# VNN-COMP's interface: install_tool.sh v1. Installs Trivet beside the scripts, from the sources that they lie in.
set -eu
[ "${1-}" = v1 ] || { echo "install_tool.sh: got '${1-}', expected v1" >&2; exit 1; }
root=$(cd "$(dirname "$0")/../.." && pwd)
"${MAKE:-make}" -C "$root" .venv/.installed
