# Sourced by scripts/test: the tests that need a GPU, and benchmarks/first_gpu.py, with the stand-in. Arguments go to pytest.

command -v gcc >/dev/null && command -v nm >/dev/null || fail "the stand-in is compiled with gcc (on Debian: apt install gcc)."
VENV_PATH=$root/.venv-cuda
[ -x "$VENV_PATH/bin/python" ] || make_environment "$(suitable_python)" "$VENV_PATH"
# PyPI's torch is built for CUDA. On a machine without a GPU, the settings of pip may prefer another.
export PIP_CONFIG_FILE=/dev/null PIP_INDEX_URL=https://pypi.org/simple PIP_FIND_LINKS=
use_environment dev
cd -- "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONPATH=$root
status=0
python -m tests.tools.stand_in_gpu python -m pytest -n 0 -m "gpu and not real_gpu" "$@" || status=1
rm -f "$root/.gpu/stand-in.json"
# Its rates are those of this machine, and mean nothing; that every section is done is what counts.
python -m tests.tools.stand_in_gpu python -m benchmarks.first_gpu --size tiny --minutes 60 --patience 4 \
  --json "$root/.gpu/stand-in.json" || status=1
exit "$status"
