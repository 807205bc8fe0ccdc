#!/usr/bin/env bash
# On a machine with a GPU and torch, but perhaps no network: build in place, run all tests, then the micro benchmarks.
# Usage: benchmarks/gpu.sh OUTPUT_FOLDER      (full logs and the table are written there; a summary is printed last)
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu.sh OUTPUT_FOLDER}
mkdir -p "$out"
export PYTHONPATH="src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
python3 setup.py -q build_ext --inplace > "$out/build.log" 2>&1 || tail -5 "$out/build.log"
timeout 400 python3 -m pytest -q -p no:cacheprovider -o timeout_method=thread --durations=10 tests > "$out/tests.log" 2>&1
tests=$?
timeout 300 python3 -m benchmarks.micro --limit 120 --out "$out/micro" > "$out/micro.log" 2>&1
bench=$?
timeout 60 python3 -m stormtorch.cli demo > "$out/demo.log" 2>&1
demo=$?
grep -E 'FAILED|ERROR|Error' "$out/tests.log" | head -40
tail -3 "$out/tests.log"
cat "$out/demo.log" "$out/micro.log"
echo "tests exit $tests, benchmarks exit $bench, demo exit $demo"
exit $((tests || bench || demo))
