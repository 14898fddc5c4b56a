# Sourced by train.sh, .ci/run and the scripts beside it: puts a Python environment with simpletuner in front of PATH,
# and makes what is missing. What it says goes to stderr, so that the output of a command stays its own.

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
versions="Python 3.11 to 3.14"

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

is_suitable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

# Names on PATH may start nothing (pyenv leaves such), so each is tried.
suitable_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.14 python; do
    if is_suitable "$name"; then
      echo "$name"
      return
    fi
  done
  fail "simpletuner needs $versions (found: $(python3 --version 2>/dev/null || echo none));" \
    "on Ubuntu: apt -y install python3.13 python3.13-venv"
}

existing_environment() {
  local folder
  for folder in "${VENV_PATH:-}" "${VIRTUAL_ENV:-}" "$root/.venv" "$root/venv"; do
    if [ -n "$folder" ] && [ -x "$folder/bin/python" ]; then
      (cd -- "$folder" && pwd)
      return
    fi
  done
  return 1
}

# $1 is the Python that makes it, $2 its folder.
make_environment() {
  echo "No Python environment was found; making one in $2 ($("$1" --version))." >&2
  "$1" -m venv "$2" >&2 || fail "the environment could not be made (on Ubuntu, python3-venv may be missing)."
}

# The Python of a version such as 3.13, on PATH or one of pyenv's.
python_of() {
  local name
  for name in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if is_suitable "$name"; then
      command -v -- "$name"
      return
    fi
  done
  return 1
}

# Makes .venv-<version> the environment of what follows, beside the usual one.
choose_python() {
  local python
  VENV_PATH=$root/.venv-$1
  if [ ! -x "$VENV_PATH/bin/python" ]; then
    python=$(python_of "$1") || fail "no Python $1 is on PATH or among pyenv's (simpletuner needs $versions)."
    make_environment "$python" "$VENV_PATH"
  fi
}

# $1 is an extra of pyproject.toml, or nothing.
is_installed() {
  if [ -n "$1" ]; then
    "$folder/bin/python" "$root/scripts/missing_packages.py" "$1" >&2
  else
    [ -x "$folder/bin/simpletuner" ] # pip writes it last, so that a set-up that was cut off goes on
  fi
}

install() {
  echo "Installing simpletuner${1:+ [$1]} into $folder; the first time this takes some minutes." >&2
  "$folder/bin/python" -m pip --version >/dev/null 2>&1 || "$folder/bin/python" -m ensurepip >/dev/null || true
  (cd -- "$root" && "$folder/bin/python" -m pip install -e ".${1:+[$1]}" >&2) ||
    fail "the packages could not be installed; the lines above say why. Start again when that is mended."
}

# $1 is an extra that must be installed, or nothing: then a simpletuner that is on PATH already will do.
use_environment() {
  local extra=${1:-} folder python
  if [ -n "${VENV_PATH:-}" ] && [ ! -x "$VENV_PATH/bin/python" ]; then
    fail "VENV_PATH is $VENV_PATH, but there is no Python environment."
  fi
  if ! folder=$(existing_environment); then
    if [ -z "$extra" ] && command -v simpletuner >/dev/null; then
      return
    fi
    folder=$root/.venv python=$(suitable_python)
    make_environment "$python" "$folder"
  fi
  is_suitable "$folder/bin/python" ||
    fail "simpletuner needs $versions, but the environment $folder has $("$folder/bin/python" --version)."
  is_installed "$extra" || install "$extra"
  export VIRTUAL_ENV=$folder PATH="$folder/bin:$PATH"
}
