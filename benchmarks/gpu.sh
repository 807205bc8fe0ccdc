#!/usr/bin/env bash
# On a machine with a GPU and torch, but perhaps no network: build in place, then run the parts asked for.
# Usage: [COMMIT=HASH] [OLD=FOLDER] [ROUNDS=N] benchmarks/gpu.sh OUTPUT_FOLDER [PART ...]       (default: tests micro demo)
#   tests, gpu-tests   all tests, or only those that are skipped elsewhere           (gpu-tests: 190 s on an H200)
#   micro, demo        the micro benchmarks of this machine; the demo
#   grid:MODEL         `Trainer` in pairs: auto beside checkpointing, busy time       (200 to 300 s: qwen-1b, moe-2b, llama-2b)
#   busy:MODEL         only the busy time of that, by our report and torch.profiler       (60 s)
#   long               one sequence of 65,536 tokens                                  (380 s)
#   generate           one sequence from 7e9 weights in 6 GiB                         (130 s)
#   experts            the same from 30e9 weights, a mixture of 128 experts, in 12 GiB  (not timed yet)
#   models[:CASE,...]  models of transformers and diffusers, each beside resident and FSDP2; CASE is MODEL[:SHAPE]
#                      (not timed yet; a model and a shape should take 200 to 300 s: name one or two at a time)
#   main, sizes        the training table's streamed cases; the same at 32 and 2 sequences   (60 s, 90 s)
#   ahead              the clipped default once updates begin in backward, at 8 and 2 sequences (not timed yet)
#   activations        the activations table's streamed cases                         (60 s)
#   opening            what a session does while it is being opened, and a profile of it   (not timed yet)
#   vocabulary         large vocabularies within small budgets                        (not timed yet)
#   first-loss         seconds from a model's files to the first loss                 (not timed yet)
# main, sizes, activations and opening run again in OLD, a checkout of an older commit; ROUNDS times, in turns: two processes that
# do the same differ by some per cent.
# Logs, and tables as NAME.md, are written to the output folder; the tables are printed.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: benchmarks/gpu.sh OUTPUT_FOLDER [PART ...]}")
shift
parts=${*:-tests micro demo}
commit=${COMMIT:-$(git rev-parse --short HEAD 2> /dev/null || echo unknown)}
mkdir -p "$out"
export PYTHONPATH="src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
for folder in . ${OLD:-}; do
  (cd "$folder" && python3 setup.py -q build_ext --inplace --force) > "$out/build.log" 2>&1 || tail -5 "$out/build.log"
done

# Run a benchmark here, and in OLD: NAME SECONDS MODULE [ARGUMENT ...]
both() {
  local name=$1 seconds=$2 failed=0
  shift 2
  for round in $(seq "${ROUNDS:-1}"); do
    timeout "$seconds" python3 -m "$@" --commit "$commit" --out "$out/$name-$round" || failed=1
    if [ -n "${OLD:-}" ]; then
      (cd "$OLD" && timeout "$seconds" python3 -m "$@" --commit "old" --out "$out/$name-$round-old") || failed=1
    fi
  done
  grep -H '^| ' "$out/$name"-*.md | grep -v -e '| case ' -e '|---' | sed "s#^$out/##"
  return $failed
}

# Where pytest-xdist is at hand: several processes, which must not compete for cores, nor meet a plugin that objects.
tests() {
  local parallel=
  if python3 -c 'import xdist' 2> /dev/null; then
    parallel="-n $(($(nproc) * 3 / 4)) --dist worksteal"
    export PYTEST_ADDOPTS="-p no:benchmark" OMP_NUM_THREADS=2
  fi
  timeout 560 python3 -m pytest -v $parallel -p no:cacheprovider -o timeout_method=thread --durations=10 "$@" tests
}

run() {
  case $1 in
    tests) (tests) ;;
    gpu-tests) (tests -m gpu) ;;
    micro) timeout 300 python3 -m benchmarks.micro --limit 120 --out "$out/micro" ;;
    demo) timeout 100 python3 -m stormtorch.cli demo ;;
    grid:*) python3 -m benchmarks.trainer.paired "${1#grid:}" --rounds 6 --steps 8 --limit 330 --commit "$commit" --out "$out/paired-${1#grid:}" ;;
    busy:*) python3 -m benchmarks.trainer.paired "${1#busy:}" --rounds 0 --limit 120 --commit "$commit" --out "$out/busy-${1#busy:}" ;;
    long) # auto compares plans from the 8th step on; a method without plans needs no such warm-up
      python3 -m benchmarks.trainer.long --methods auto auto-little-ram --limit 175 --warm 18 --steps 4 --commit "$commit" --out "$out/long"
      python3 -m benchmarks.trainer.long --methods checkpoint --limit 90 --warm 5 --steps 4 --commit "$commit" --out "$out/long-checkpoint"
      ;;
    generate) python3 -m benchmarks.inference link storm-no-cudnn storm accelerate --tokens 20 --warm 12 --limit 62 --commit "$commit" --out "$out/generate" ;;
    experts) python3 -m benchmarks.inference link storm-no-cudnn accelerate --size moe-30b --vram 12GiB --tokens 32 --warm 12 --limit 170 --commit "$commit" --out "$out/experts" ;;
    models | models:*)
      words=${1#models}
      words=${words#:}
      timeout 580 python3 -m benchmarks.models ${words//,/ } --commit "$commit" --out "$out/table-${1//[:,]/-}"
      ;;
    main) both main 180 benchmarks.training storm-backward storm-forward+clip --vram 14GiB --steps 10 --limit 60 ;;
    ahead) # decided after 30 steps, judged after 50
      timeout 300 python3 -m benchmarks.training resident+clip storm-forward+clip resident+clip@2 storm-forward+clip@2 --vram 14GiB --warm-steps 54 --steps 16 --limit 110 --commit "$commit" --out "$out/ahead"
      ;;
    sizes) both large 180 benchmarks.training storm-backward@32 storm-forward@32 --vram 44GiB --steps 5 --limit 80 &&
      both small 90 benchmarks.training storm-backward@2 --vram 14GiB --steps 10 --limit 60 ;;
    activations) both activations 240 benchmarks.activations forward_backward --methods storm-auto storm-offload --vram 12.8GiB --limit 80 ;;
    opening)
      both opening 90 benchmarks.training.opening --processes 2 --as-it-is
      timeout 60 python3 -m benchmarks.training.opening --processes 1 --as-it-is --profile --commit "$commit" --out "$out/opening-profile"
      ;;
    vocabulary) timeout 580 python3 -m benchmarks.vocabulary --limit 90 --commit "$commit" --out "$out/vocabulary" ;;
    first-loss) timeout 300 python3 -m benchmarks.finetune.first_loss --limit 60 --commit "$commit" --out "$out/first-loss" ;;
    *) echo "no such part: $1"; exit 2 ;;
  esac
}

failed=0
for part in $parts; do
  log="$out/${part//[:,]/-}.log"
  began=$SECONDS
  (run "$part") > "$log" 2>&1
  status=$?
  [[ "$part" = *tests ]] && grep -E '^(FAILED|ERROR|E  )' "$log" | cut -c1-300 | head -40
  tail -40 "$log" | cut -c1-300
  echo "$part: exit $status after $((SECONDS - began)) s"
  failed=$((failed || status))
done
exit $failed
