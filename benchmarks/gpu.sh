#!/usr/bin/env bash
# On a machine with a GPU and torch, but perhaps no network: build in place, then run the parts asked for.
# Usage: benchmarks/gpu.sh OUTPUT_FOLDER [tests | gpu-tests] [micro] [demo]      (default: tests micro demo; logs and tables are written there)
# gpu-tests are those that are skipped elsewhere.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUTPUT_FOLDER [tests | gpu-tests] [micro] [demo]}
shift
parts=${*:-tests micro demo}
mkdir -p "$out"
export PYTHONPATH="src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
python3 setup.py -q build_ext --inplace --force > "$out/build.log" 2>&1 || tail -5 "$out/build.log"
# Where pytest-xdist is at hand: several processes, which must not compete for cores, nor meet a plugin that objects.
parallel=
if python3 -c 'import xdist' 2> /dev/null; then
  parallel="-n $(($(nproc) * 3 / 4)) --dist worksteal"
  export PYTEST_ADDOPTS="-p no:benchmark" OMP_NUM_THREADS=2
fi
pytest="python3 -m pytest -v $parallel -p no:cacheprovider -o timeout_method=thread --durations=10"
failed=0
for part in $parts; do
  case $part in
    tests) timeout 560 $pytest tests > "$out/$part.log" 2>&1 ;;
    gpu-tests) timeout 560 $pytest -m gpu tests > "$out/$part.log" 2>&1 ;;
    micro) env -u OMP_NUM_THREADS timeout 300 python3 -m benchmarks.micro --limit 120 --out "$out/micro" > "$out/micro.log" 2>&1 ;;
    demo) timeout 100 python3 -m stormtorch.cli demo > "$out/demo.log" 2>&1 ;;
    *) echo "no such part: $part"; exit 2 ;;
  esac
  status=$?
  [[ "$part" = *tests ]] && grep -E '^(FAILED|ERROR|E  )' "$out/$part.log" | cut -c1-300 | head -40
  tail -40 "$out/$part.log" | cut -c1-300
  echo "$part: exit $status"
  failed=$((failed || status))
done
exit $failed
