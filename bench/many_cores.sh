#!/bin/bash
# The main job's two benches on a machine with 16 cores or more, as many minutes as MINUTES says for the overhead:
# what being managed costs (nothing beside it), then what failures cost at three layouts (five cores each).
#
#   MINUTES=4 OUT=bench/results bench/many_cores.sh
#
# Called again, it adds to the rounds of the overhead that it kept in SAMPLES; RECOVERY=no leaves the failures out.
# Wheels of what that machine's Python lacks are taken from WHEELS, when it is there; no registry is asked then.
set -u
out=${OUT:?where the tables go}; wheels=${WHEELS:-.wheels}; python=${PYTHON:-python3}
export OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= UNICRON_CUDA=OFF PIP_BREAK_SYSTEM_PACKAGES=1
if [ -d "$wheels" ]; then
  "$python" -m pip install --quiet --no-index --no-deps "$wheels"/*.whl
  timeout 300 "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation . || exit 1
else
  timeout 900 "$python" -m pip install --quiet '.[train]' || exit 1
fi
cd bench || exit 1
{ nproc --all; uname -r; "$python" -c 'import torch, megatron.core as m; print(torch.__version__, m.__version__)'; } | tee "$out/machine.txt"
timeout -k 5 $((60 * ${MINUTES:-4} + 90)) "$python" bench_overhead.py --minutes "${MINUTES:-4}" --runs 500 --json \
  --samples "${SAMPLES:-/tmp/overhead_rounds.json}" \
  > "$out/overhead.json" 2> "$out/overhead.log" < /dev/null
tail -2 "$out/overhead.log"
[ "${RECOVERY:-yes}" = no ] && exit
core=0
for layout in 1,1,4 2,1,2 1,2,2; do
  taskset -c $core-$((core + 4)) timeout -k 5 "${RECOVERY_S:-200}" "$python" bench_recovery.py --layout $layout --json \
    --runs "${RUNS:-6}" --nodes 3 --torchrun "${TORCHRUN:-0}" \
    > "$out/recovery_${layout//,/-}.json" 2> "$out/recovery_${layout//,/-}.log" < /dev/null &
  core=$((core + 5))
done
wait
tail -n 3 "$out"/recovery_*.log
