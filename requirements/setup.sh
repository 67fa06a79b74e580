#!/usr/bin/env bash
# Creates the virtual environment of the CPU stack: setup.sh PYTHON VENV
#
# A stamp with the hash of everything that decides the environment makes a second call take no time. An
# interrupted set-up leaves no stamp and is taken up again. The log is VENV/setup.log.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$1
VENV=$2
REQUIREMENTS=requirements/cpu.txt
LOG=$VENV/setup.log

say() { printf '[setup] %s\n' "$*" >&2; }

fail() {
    say "error: $*"
    exit 1
}

# step TEXT COMMAND...: run quietly, say how long it took, show the end of the log where it failed.
step() {
    local text=$1 start=$SECONDS
    shift
    say "$text ..."
    if ! "$@" >>"$LOG" 2>&1 </dev/null; then
        tail -n 25 "$LOG" >&2
        fail "$text failed after $((SECONDS - start)) s (whole log: $LOG)"
    fi
    say "$text: $((SECONDS - start)) s"
}

# ---------------------------------------- packages of the system

has_library() {
    # Not `grep -q`: it would end the pipe early, and pipefail takes that for a miss.
    { ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | grep "$1" >/dev/null
}

is_python311() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; }

has_venv() { "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null; }

# libnuma1: vLLM's extension links it. g++ and Python.h: torch compiles a few small kernels when first used.
missing_packages() {
    local missing=()
    command -v "$PYTHON" >/dev/null || missing+=(python3.11)
    has_venv || missing+=(python3.11-venv)
    has_library libnuma.so.1 || missing+=(libnuma1)
    command -v g++ >/dev/null || missing+=(g++)
    if command -v "$PYTHON" >/dev/null; then
        local header='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
        "$PYTHON" -c "$header" || missing+=(python3.11-dev)
    else
        missing+=(python3.11-dev)
    fi
    echo "${missing[*]:-}"
}

install_packages() {
    local missing
    if [ "$PYTHON" != python3.11 ] || command -v "$PYTHON" >/dev/null; then
        is_python311 "$PYTHON" || fail "'$PYTHON' is no working Python 3.11 (make PYTHON=/path/to/python3.11)"
    fi
    missing=$(missing_packages)
    [ -z "$missing" ] && return
    if ! command -v apt-get >/dev/null; then
        fail "missing: $missing (names of Debian packages; install what your system calls them)"
    elif [ "$(id -u)" != 0 ]; then
        fail "missing packages: run 'sudo apt-get install $missing' and try again"
    fi
    export DEBIAN_FRONTEND=noninteractive
    step "apt-get update" apt-get update -q
    # shellcheck disable=SC2086
    step "apt-get install $missing" apt-get install -q -y --no-install-recommends $missing
    missing=$(missing_packages)
    [ -z "$missing" ] || fail "still missing after apt-get install: $missing"
}

# ---------------------------------------- Python packages

pip_install() { "$VENV/bin/python" -m pip install --no-deps --progress-bar off "$@"; }

# PyPI's torch is the CUDA build. Where pip's index has no CPU build, uv knows where PyTorch keeps it.
install_torch() {
    local pin=$1
    "$VENV/bin/python" -c "import torch, sys; sys.exit('torch==' + torch.__version__ != '$pin')" 2>/dev/null && return
    pip_install "$pin" && return
    echo "pip finds no $pin, trying uv"
    pip_install uv && "$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps --torch-backend=cpu "${pin%+cpu}"
}

install_rest() {
    pip_install -r <(grep -v '^torch==' "$REQUIREMENTS")
}

install_project() {
    pip_install --no-build-isolation -e .
}

# ---------------------------------------- main

main() {
    local hash stamp start=$SECONDS torch_pin
    mkdir -p "$VENV"
    hash=$(cat "$REQUIREMENTS" pyproject.toml requirements/setup.sh | sha256sum | cut -c1-16)
    stamp=$VENV/.setup-$hash
    if [ -e "$stamp" ] && "$VENV/bin/python" -c '' 2>/dev/null; then
        return
    fi
    : >"$LOG"
    install_packages
    if ! is_python311 "$VENV/bin/python" || ! "$VENV/bin/python" -c 'import pip' 2>/dev/null; then
        step "virtual environment $VENV" "$PYTHON" -m venv "$VENV"
    fi
    torch_pin=$(grep '^torch==' "$REQUIREMENTS")
    step "$torch_pin" install_torch "$torch_pin"
    step "$(grep -vc '^torch==' "$REQUIREMENTS") further packages (about two minutes when new)" install_rest
    step "megatron-agent itself" install_project
    rm -f "$VENV"/.setup-*
    touch "$stamp"
    say "ready after $((SECONDS - start)) s"
}

# In a function, so that the whole file is read before anything runs: an update of it cannot disturb a set-up.
main
exit 0
