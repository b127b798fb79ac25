#!/bin/bash
# The peers on the same work as unicron. Sets up what is missing (the project's own environment by `make setup`, one
# environment a peer under build/peers/, pinned in bench/peers/requirements/), then runs the comparison.
#
#   bench/peers/run.sh --quick                     torchrun and unicron, kill and stop, tuned, one run each: minutes
#   bench/peers/run.sh                             every cell that bench/results/peers/ does not hold yet: hours
#   bench/peers/run.sh --systems torchft --faults kill stop --settings tuned --runs 3
#   bench/peers/run.sh --setup [PEER...]           only the environments
#   bench/peers/run.sh --gpu ...                   two ranks, a GPU each, into bench/results/peers_gpu/
#
# With --gpu the peers take the torch that PYTHON has (one that knows the GPUs), and only they themselves are installed,
# from PEERS_WHEELS where that folder is given.
#
# PYTHON: an interpreter that has unicron (default: .venv of the checkout, made when it is not there).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
environments=$root/build/peers
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ -z "${PYTHON:-}" ]; then
  make -C "$root" --no-print-directory setup
  PYTHON=$root/.venv/bin/python
fi

# NVRx's wheel asks for glibc 2.39, but only its CUPTI part is native and that is not used here: it is unpacked as it is.
nvrx_wheel() {
  local site version
  version=$("$environments/nvrx/bin/python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
  site=$("$environments/nvrx/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  "$environments/nvrx/bin/python" -m pip install --quiet --no-deps --only-binary=:all: --platform manylinux_2_39_x86_64 \
    --python-version "$version" --target "$site" --upgrade -r "$here/requirements/nvrx-wheel.txt"
}

set_up() {
  local peer=$1 folder=$environments/$1 base
  local stamp=$folder/.installed
  if [ -e "$stamp" ] && ! [ "$here/requirements/$peer.txt" -nt "$stamp" ]; then return; fi
  base=$("$PYTHON" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
  echo "setting up $folder" >&2
  "$base" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet -r "$here/requirements/$peer.txt"
  if [ "$peer" = nvrx ]; then nvrx_wheel; fi
  touch "$stamp"
}

# A peer beside PYTHON's own torch: what is pinned, without torch and what comes with it.
BESIDE='^(torch|numpy|sympy|networkx|mpmath|Jinja2|MarkupSafe|fsspec|filelock|typing_extensions|nvidia-ml-py|setuptools)=='
borrow() {
  local peer=$1 folder=$environments/$1
  local site=$folder/site bin=$folder/bin
  if [ -e "$folder/.installed" ]; then return; fi
  echo "setting up $folder" >&2
  rm -rf "$folder"
  mkdir -p "$bin" "$site"
  local list=("$here/requirements/$peer.txt")
  if [ "$peer" = nvrx ]; then list+=("$here/requirements/nvrx-wheel.txt"); fi
  cat "${list[@]}" | grep -vE "$BESIDE" >"$folder/pins.txt" || true
  local from=()
  if [ -n "${PEERS_WHEELS:-}" ]; then from=(--no-index --find-links "$PEERS_WHEELS"); fi
  if [ -s "$folder/pins.txt" ]; then
    "$PYTHON" -m pip install --quiet --no-deps "${from[@]}" --target "$site" -r "$folder/pins.txt" || return 1
  fi
  # shellcheck disable=SC2016
  printf '#!/bin/sh\nPYTHONPATH="%s${PYTHONPATH:+:$PYTHONPATH}" exec "%s" "$@"\n' "$site" "$PYTHON" >"$bin/python"
  for script in "$site"/bin/*; do
    [ -e "$script" ] || continue
    printf '#!/bin/sh\nexec "%s/python" "%s" "$@"\n' "$bin" "$script" >"$bin/$(basename "$script")"
  done
  chmod +x "$bin"/*
  touch "$folder/.installed"
}

# Which environments the systems asked for need.
needed() {
  local word taking=no found=()
  for word in "$@"; do
    case $word in
      --quick) echo torchrun; return ;;
      --systems) taking=yes ;;
      --*) taking=no ;;
      *) if [ $taking = yes ]; then found+=("$word"); fi ;;
    esac
  done
  if [ ${#found[@]} = 0 ]; then found=(torchrun torchft nvrx-injob dlrover-run); fi
  for word in "${found[@]}"; do
    case $word in
      nvrx-*) echo nvrx ;;
      dlrover-run) echo dlrover ;;
      unicron | megatron) ;;
      *) echo "$word" ;;
    esac
  done | sort -u
}

if [ "${1:-}" = --gpu ]; then
  shift
  export PEERS_MACHINE=gpu
  environments=$root/build/peers-gpu
  for peer in $(needed "$@"); do
    borrow "$peer" || echo "$peer cannot be set up: its cells are not measured" >&2
  done
  export PYTHONPATH=$root/bench${PYTHONPATH:+:$PYTHONPATH}
  exec "$PYTHON" -m peers.compare "$@"
fi
if [ "${1:-}" = --setup ]; then
  shift
  for peer in ${*:-torchrun torchft nvrx dlrover}; do set_up "$peer"; done
  exit
fi
for peer in $(needed "$@"); do set_up "$peer"; done
export PYTHONPATH=$root/bench${PYTHONPATH:+:$PYTHONPATH}
exec "$PYTHON" -m peers.compare "$@"
