#!/bin/sh
# Prints the path of a Python 3.12 or newer that can make virtual environments, or says on standard error that there is none.
#   find_python.sh            the first found, or the one named by the variable PYTHON
#   find_python.sh --newest   the newest of them that JAX has wheels for
#   find_python.sh --all      all of them, one a line, last those without a pip to put into an environment
# Names on PATH are tried by running them: a pyenv shim may exist for a version that is not active.

checkout=$(cd "$(dirname "$0")/.." && pwd)

candidates() {
    if [ -n "${PYTHON:-}" ]; then
        command -v "$PYTHON"
        return
    fi
    for name in python3.12 python3.13 python3.14 python3 python; do
        command -v "$name"
    done
    for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}"; do
        for python in "$folder"/*3.1[2-4].*/bin/python3; do
            [ -x "$python" ] && echo "$python"
        done
    done
}

# Prints the minor version, 1 if pip is at hand, and the path. Free-threaded builds cannot load an abi3 module; the checkout's own
# environments (one may be active) cannot be the base from which they are made again.
describe='
import importlib.util, sys, sysconfig, venv
if sys.version_info < (3, 12) or sysconfig.get_config_var("Py_GIL_DISABLED"):
    sys.exit(1)
if sys.prefix.startswith(sys.argv[1] + "/.venv"):
    sys.exit(1)
print(sys.version_info[1], int(importlib.util.find_spec("ensurepip") is not None), sys.executable)
'

found=$(candidates | while read -r python; do "$python" -I -c "$describe" "$checkout" 2>/dev/null; done | awk '!seen[$3]++')
[ "${1:-}" = --all ] || found=$(echo "$found" | awk '$2 == 1')
case "${1:-}" in
    --newest) found=$(echo "$found" | awk '$1 <= 14' | sort -n -s -k1,1 | tail -n 1) ;;
    --all) found=$(echo "$found" | sort -s -r -n -k2,2) ;;
    *) found=$(echo "$found" | head -n 1) ;;
esac
if [ -z "$found" ]; then
    if [ -n "${PYTHON:-}" ]; then
        echo "PYTHON=$PYTHON is not a Python 3.12 or newer with the modules venv and ensurepip." >&2
    else
        echo "No Python 3.12 or newer (with the modules venv and ensurepip) on PATH, under pyenv or under uv." >&2
        echo "Install one (apt install python3.12-venv, pyenv install 3.12, uv python install 3.12)," >&2
        echo "or name it: make PYTHON=/path/to/python3.12 ..." >&2
    fi
    exit 1
fi
echo "$found" | cut -d' ' -f3-
