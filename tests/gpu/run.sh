#!/usr/bin/env bash
# Builds, tests and measures everything about GPUs, within ten minutes, on a machine with one or two of them.
#
#   OUT=folder tests/gpu/run.sh [STEP ...]        all steps without arguments; wheels it needs lie in .whl/,
#                                              the peers' in .whl-peers/ (bench/peers/run.sh --gpu)
#
# Each step has its own limit, a failing one stops nothing, and none begins that would outlast BUDGET seconds: what is
# asked first stands first. In OUT: log.txt (all output), summary.md (a line per step), tables.md (the benches' tables),
# managed.jsonl, histories.jsonl, peers/, managed-logs.tgz.
set -uo pipefail
cd "$(dirname "$0")/../.."
OUT=${OUT:-$PWD/results/gpu}
mkdir -p "$OUT"
exec > >(tee -a "$OUT/log.txt") 2>&1
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 # multicast can take a shared host's GPUs down
PYTHON=${PYTHON:-python3}
BUDGET=${BUDGET:-570}
SITE=/tmp/unicron-gpu-site
export PYTHONPATH="$SITE:$PWD/python:$PWD/tests/support:$PWD/bench${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$SITE/bin:$PATH"

# step NAME SECONDS COMMAND...
step() {
  local name=$1 limit=$2
  shift 2
  if [ "${#STEPS[@]}" -gt 0 ] && [[ " ${STEPS[*]} " != *" $name "* ]]; then return; fi
  local left=$((BUDGET - SECONDS))
  if [ "$left" -lt 15 ]; then
    echo "| $name | not begun | $SECONDS s are over |" >>"$OUT/summary.md"
    return
  fi
  [ "$limit" -gt "$left" ] && limit=$left
  echo "=== $name: $*"
  local begun=$SECONDS
  timeout -s TERM -k 15 "$limit" "$@" # told first: a case that hangs says where, and its cluster is taken down
  local code=$?
  echo "=== $name: exit $code after $((SECONDS - begun)) s"
  echo "| $name | $code | $((SECONDS - begun)) s |" >>"$OUT/summary.md"
}

# As step, and each line of the output also goes to tables.md as it comes.
table() {
  local name=$1 limit=$2
  shift 2
  # shellcheck disable=SC2016
  step "$name" "$limit" bash -c \
    'trap : TERM; set -o pipefail; "$@" | (trap "" TERM; exec tee -a "$0")' "$OUT/tables.md" "$@"
}

facts() {
  nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv
  nvidia-smi topo -m
  uname -r
  nvcc --version | tail -2
  $PYTHON -c 'import sys, torch; print(sys.version); print("torch", torch.__version__, torch.cuda.nccl.version())'
  ls -l /dev/nvidia*
}

build() {
  if compgen -G '.whl/*.whl' >/dev/null; then
    $PYTHON -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$SITE" .whl/*.whl
  fi
  rm -rf build/cmake-* python/unicron/_core*.so
  export UNICRON_CUDA=ON
  if ! $PYTHON setup.py -q build_ext --inplace >"$OUT/build.txt" 2>&1; then
    grep -m 20 -E 'error|warning' "$OUT/build.txt" # a compiler that this project does not know yet
    UNICRON_WERROR=OFF $PYTHON setup.py -q build_ext --inplace
  fi
  tail -8 "$OUT/build.txt"
  $PYTHON -c 'from unicron import _core; assert _core.cuda; print(_core.__file__)'
}

wheel() { # built with CUDA, it imports where no driver is found
  rm -rf /tmp/unicron-wheel /tmp/unicron-wheel-site
  UNICRON_CUDA=ON $PYTHON -m pip wheel -q --no-build-isolation --no-deps -w /tmp/unicron-wheel . &&
    $PYTHON -m pip install -q --no-index --no-deps --target /tmp/unicron-wheel-site /tmp/unicron-wheel/*.whl &&
    (cd /tmp && PYTHONPATH=/tmp/unicron-wheel-site:$SITE $PYTHON -c \
      'import unicron; from unicron import _core; print("wheel", _core.cuda, _core.__file__)')
}

managed() { # LAYOUT SIZE CASES [OPTION...]
  local layout=$1 size=$2 cases=$3
  shift 3
  "$PYTHON" tests/gpu/managed.py --layout "$layout" --size "$size" --cases "$cases" \
    --folder results/managed "$@"
}

histories() { # SECONDS [OPTION...]: random faults in exact mode, all to end in the same bits
  local seconds=$1
  shift
  "$PYTHON" -m unicron.demo.histories --layout 1,1,2 --count 20 --seconds "$seconds" --timeout 25 \
    --into "$OUT/histories.jsonl" --folder results/histories "$@"
  local code=$?
  if [ "$code" -ne 0 ]; then
    find results/histories -name '*.log' -size +0 -printf '%T@ %p\n' | sort -n | tail -8 | cut -d' ' -f2- |
      while read -r path; do echo "--- $path" && tail -n 15 "$path" | cut -c1-300; done
  fi
  return "$code"
}

moves() { # LAYOUT [OPTION...]
  local layout=$1
  shift
  "$PYTHON" tests/gpu/moves.py --layout "$layout" --folder results/moves "$@"
}

keep_logs() {
  cp results/managed/managed.jsonl "$OUT/" 2>/dev/null
  cat results/moves/*/moves.jsonl >"$OUT/moves.jsonl" 2>/dev/null
  tar -czf "$OUT/managed-logs.tgz" --exclude='*.npy' --exclude='*.pt' results/managed results/histories results/moves \
    2>/dev/null
}

export -f facts build wheel managed histories moves
export PYTHON SITE OUT
STEPS=("$@")
pytest=("$PYTHON" -m pytest -q -p no:cacheprovider -s)
all_kills=kill-compute,kill-reduce,kill-commit,kill-step,segv-compute,exception-compute,kill-now
hangs=illegal-access,hang,not-joining,exception-reduce,stop-now,illegal-access-reduce
export CUBLAS_WORKSPACE_CONFIG=:4096:8 # equal bits

step facts 60 bash -c facts
step build 240 bash -c build
step unit 60 "${pytest[@]}" tests/unit/test_native_gpu.py tests/unit/test_arena_keeper.py
step kernels 90 "${pytest[@]}" tests/gpu/test_kernels.py
step faults 60 "${pytest[@]}" tests/gpu/test_gpu_faults.py
step exact 90 "${pytest[@]}" tests/unit/test_exact.py
table managed_dp2 130 bash -c "managed 1,1,2 small $all_kills --timeout 40 --unmanaged"
table managed_hangs 120 bash -c "managed 1,1,2 small $hangs --timeout 40"
table managed_buddy 90 bash -c 'managed 1,1,2 small kill-reduce,node-now --sharded --buddy --iterations 40 --timeout 40'
step histories 190 bash -c 'trap : TERM; histories 150'
table moves 200 bash -c 'moves 1,1,1 --cases all,no-warm-up'
table moves_dp2 290 bash -c 'moves 1,1,2 --cases all,no-groups,node-lost' # of three GPUs or more
table moves_350m 200 bash -c 'moves 1,1,1 --size 350m --cases all'
table bench_steady 150 "$PYTHON" bench/gpu/bench_steady.py --seconds 75
table bench_steady_sharded 150 "$PYTHON" bench/gpu/bench_steady.py --seconds 75 --sharded
table bench_steady_overlap 150 "$PYTHON" bench/gpu/bench_steady.py --seconds 75 --sharded --overlap
table bench_idle 140 "$PYTHON" bench/gpu/bench_idle.py
table bench_idle_sharded 140 env UNICRON_DEMO_SIZE=350m "$PYTHON" bench/gpu/bench_idle.py --sharded
table bench_torchrun 110 "$PYTHON" bench/gpu/bench_torchrun.py --sizes small 350m
table managed_350m 150 bash -c \
  'managed 1,1,2 350m kill-compute,kill-reduce,kill-now,illegal-access --timeout 60 --unmanaged'
table managed_350m_sharded 150 bash -c \
  'managed 1,1,2 350m kill-step,kill-compute,segv-compute,exception-compute --timeout 60 --sharded --iterations 14'
table managed_buddy_every 90 bash -c \
  'managed 1,1,2 small kill-step,node-now --sharded --buddy-every 5 --iterations 60 --timeout 40'
table bench_steady_buddy 150 \
  "$PYTHON" bench/gpu/bench_steady.py --seconds 70 --sharded --buddy-every 10 --block 10
step histories_sharded 190 bash -c 'trap : TERM; histories 150 --distributed'
table managed_sharded 100 bash -c 'managed 1,1,2 small kill-reduce,kill-step --sharded --unmanaged'
table managed_instances 90 bash -c 'managed 1,1,2 small kill-step,node-now --sharded --instances 2 --iterations 40'
table managed_tp2 100 bash -c 'managed 2,1,1 small kill-compute,kill-reduce,kill-commit --unmanaged'
table managed_pp2 100 bash -c 'managed 1,2,1 small kill-compute,kill-reduce,kill-commit --unmanaged'
step nccl 150 "${pytest[@]}" tests/gpu/test_nccl.py
step template 60 "${pytest[@]}" tests/gpu/test_gpu_template.py
table bench_gone 60 "$PYTHON" bench/gpu/bench_gone.py --runs 3
table bench_groups 60 "$PYTHON" bench/gpu/bench_groups.py --runs 2
table bench_arena 60 "$PYTHON" bench/gpu/bench_arena.py --runs 2
table bench_copy 40 "$PYTHON" bench/gpu/bench_copy.py
table bench_exact 40 "$PYTHON" bench/gpu/bench_exact.py
step peers 560 env "PEERS_WHEELS=$PWD/.whl-peers" bench/peers/run.sh --gpu --into "$OUT/peers" \
  --settings tuned --faults none kill stop deadlock exception node
step doctor 30 "$PYTHON" -m unicron.cli doctor
step wheel 120 bash -c wheel
step arena 150 "${pytest[@]}" tests/gpu/test_arena.py
keep_logs
echo "=== summary"
cat "$OUT/summary.md"
