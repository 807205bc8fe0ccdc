#!/usr/bin/env bash
# On a machine with a GPU and torch, but perhaps no network: build in place, then run the parts asked for.
# Usage: [COMMIT=HASH] [OLD="FOLDER ..."] [ROUNDS=N] [LIMIT=SECONDS] benchmarks/gpu.sh OUTPUT_FOLDER [PART ...]
#
# Without parts: tests micro demo. A part is one of these; behind it, seconds on an H200 as seen or, with ~, estimated:
#   tests, gpu-tests   all tests, or only those that are skipped elsewhere                                 -, 195
#   micro, demo        the micro benchmarks of this machine; the demo                                      -
#   grid:MODEL         `Trainer` in pairs: auto beside checkpointing, with busy time; of qwen-1b, moe-2b, llama-2b
#                      three rounds in four cells                                                ~105, ~115, ~135
#   busy:MODEL         only the busy time of that, by our report and torch.profiler                        60
#   long               one sequence of 65,536 tokens: auto, by hand, auto with little RAM                  ~265
#   generate           one sequence from 7e9 weights in 6 GiB                                              130
#   main               the training table's streamed cases, in turns with every folder of OLD       ~26 a case
#   sizes              the same at 32 and 2 sequences, in turns with the last folder of OLD         90 a folder
#   activations        the activations table's streamed cases, likewise                             60 a folder
#   data               batches from 1 GB of rows and of tokens, likewise                            ~30 a folder
#   opening            what a session does while it is being opened, and a profile of it                   ~45
#   ahead              the clipped default, with updates that begin in backward and without        ~260
#   experts            one sequence from 30e9 weights, a mixture of 128 experts, in 12 GiB                 ~200
#   vocabulary         large vocabularies within small budgets                                             ~300
#   first-loss         seconds from a model's files to the first loss                                      ~100
#   disk               3e9 parameters with no, 30 % and all states on disk, beside the disk's own rate     ~260
#   disk-large         11e9 parameters in full, as much on disk as 100 GiB of RAM are short of             ~400
#   disk-peer          3e9 parameters, all states on disk: STORM, and DeepSpeed ZeRO-Infinity, which .peers must have
#                      and which needs 50 GB of disk, and minutes to compile                    ~440
#   disk-peer-weights  DeepSpeed alone, with its weights on disk too: 55 GB                     ~330
#   disk-trainer       3e9 parameters through `Trainer`, in RAM and with all states on disk     ~230
#   models[:CASE,...]  models of transformers and diffusers, each beside resident and FSDP2; CASE is MODEL[:SHAPE];
#                      a model and a shape take ~250
# or a group of them, which fits into 600 seconds, with 2 rounds and two folders in OLD:
#   first              gpu-tests grid:qwen-1b grid:moe-2b generate                            ~545, and ~20 to build
#   second             main grid:llama-2b data opening                                        ~550, and ~20
#   third              sizes activations long                                                 ~560, and ~20
#   rest               ahead first-loss experts vocabulary; as far as there is time           ~860
# OLD names folders with older commits, made before by `mkdir -p old/$c && git archive $c | tar -x -C old/$c`. Their names
# stand in the tables. Two processes that do the same differ by some per cent, hence the turns: ROUNDS of them.
# After LIMIT seconds (580 for a group) what runs is ended, and what is left is named. The three groups take ~1,710 s; of
# less time, give the third group what is left as LIMIT: it begins with what has no other run to stand on.
#
# The output folder has few files, because some machines return no more: tables.md, logs.txt and files.tar.gz (with all
# steps), written anew every ten seconds, and summary.txt, which is printed last.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: benchmarks/gpu.sh OUTPUT_FOLDER [PART ...]}")
shift
parts=${*:-tests micro demo}
limit=${LIMIT:-}
for part in $parts; do
  case $part in first | second | third | rest) limit=${limit:-580} ;; esac
done
parts=" $parts "
parts=${parts// first / gpu-tests grid:qwen-1b grid:moe-2b generate }
parts=${parts// second / main grid:llama-2b data opening }
parts=${parts// third / sizes activations long }
parts=${parts// rest / ahead first-loss experts vocabulary }
commit=${COMMIT:-$(git rev-parse --short HEAD 2> /dev/null || echo unknown)}
rounds=${ROUNDS:-2}
mkdir -p "$out"
work=$(mktemp -d -t stormtorch-gpu.XXXXXX)
export PYTHONPATH="src:${PYTHONPATH:-}" PYTHONUNBUFFERED=1

# A copy that was begun must not be seen.
pack() {
  local file
  (cd "$work" && for file in *.md */*.md; do [ -e "$file" ] && printf '\n### %s\n\n' "$file" && cat "$file"; done) > "$out/.tables"
  (cd "$work" && for file in *.log */*.log; do [ -e "$file" ] && printf '\n### %s\n\n' "$file" && cat "$file"; done) > "$out/.logs"
  tar -C "$work" -czf "$out/.files" . 2> /dev/null
  mv "$out/.tables" "$out/tables.md"
  mv "$out/.logs" "$out/logs.txt"
  mv "$out/.files" "$out/files.tar.gz"
}

for folder in . ${OLD:-}; do
  (cd "$folder" && python3 setup.py -q build_ext --inplace --force) > "$work/build.log" 2>&1 || tail -5 "$work/build.log"
done

# Run a benchmark here and in some folders of OLD, in turns: "FOLDER ..." NAME SECONDS MODULE [ARGUMENT ...]
turns() {
  local folders=$1 name=$2 seconds=$3 failed=0 round folder
  shift 3
  for round in $(seq "$rounds"); do
    timeout --foreground -k 5 "$seconds" python3 -m "$@" --commit "$commit" --out "$work/$name-$round" || failed=1
    for folder in $folders; do
      (cd "$folder" && timeout --foreground -k 5 "$seconds" python3 -m "$@" --commit "$(basename "$folder")" \
        --out "$work/$name-$round-$(basename "$folder")") || failed=1
    done
  done
  return $failed
}

# Where pytest-xdist is at hand: several processes, which must not compete for cores, nor meet a plugin that objects.
tests() {
  local parallel=
  if python3 -c 'import xdist' 2> /dev/null; then
    parallel="-n $(($(nproc) * 3 / 4)) --dist worksteal"
    export PYTEST_ADDOPTS="-p no:benchmark" OMP_NUM_THREADS=2
  fi
  timeout --foreground -k 5 560 python3 -m pytest -v $parallel -p no:cacheprovider -o timeout_method=thread --durations=10 "$@" tests
}

run() {
  local all=${OLD:-} last
  last=${all##* }
  case $1 in
    tests) tests ;;
    gpu-tests) tests -m gpu ;;
    micro) timeout --foreground -k 5 300 python3 -m benchmarks.micro --limit 120 --out "$work/micro" ;;
    demo) timeout --foreground -k 5 100 python3 -m stormtorch.cli demo ;;
    grid:*) python3 -m benchmarks.trainer.paired "${1#grid:}" --rounds 3 --steps 5 --limit 190 --commit "$commit" --out "$work/paired-${1#grid:}" ;;
    busy:*) python3 -m benchmarks.trainer.paired "${1#busy:}" --rounds 0 --limit 120 --commit "$commit" --out "$work/busy-${1#busy:}" ;;
    long) # auto compares plans from the 8th step on; a method without plans needs no such warm-up
      python3 -m benchmarks.trainer.long --methods auto --limit 150 --warm 13 --steps 3 --commit "$commit" --out "$work/long-auto"
      python3 -m benchmarks.trainer.long --methods checkpoint --limit 80 --warm 2 --steps 3 --commit "$commit" --out "$work/long-by-hand"
      python3 -m benchmarks.trainer.long --methods auto-little-ram --limit 120 --warm 7 --steps 3 --commit "$commit" --out "$work/long-little-ram"
      ;;
    generate) python3 -m benchmarks.inference link storm-no-cudnn storm accelerate --tokens 20 --warm 12 --limit 62 --commit "$commit" --out "$work/generate" ;;
    experts) python3 -m benchmarks.inference link storm-no-cudnn accelerate --size moe-30b --vram 12GiB --tokens 32 --warm 12 --limit 170 --commit "$commit" --out "$work/experts" ;;
    disk) python3 -m benchmarks.disk --steps 2 --limit 180 --commit "$commit" --out "$work/disk" ;;
    disk-large) python3 -m benchmarks.disk needed --size 11b --vram 16GiB --ram 100GiB --micro-batch 4 --steps 3 --limit 540 --commit "$commit" --out "$work/disk-large" ;;
    disk-peer) python3 -m benchmarks.disk all ds-states --warm 1 --steps 2 --limit 250 --commit "$commit" --out "$work/disk-peer" ;;
    disk-peer-weights) python3 -m benchmarks.disk ds-all --warm 1 --steps 2 --limit 250 --commit "$commit" --out "$work/disk-peer-weights" ;;
    disk-trainer) python3 -m benchmarks.disk trainer-ram trainer-all --steps 2 --limit 180 --commit "$commit" --out "$work/disk-trainer" ;;
    models | models:*)
      words=${1#models}
      words=${words#:}
      timeout --foreground -k 5 580 python3 -m benchmarks.models ${words//,/ } --commit "$commit" --out "$work/table-${1//[:,]/-}"
      ;;
    main) turns "$all" main 120 benchmarks.training storm-backward storm-forward+clip --vram 14GiB --steps 6 --limit 50 ;;
    sizes)
      rounds=${ROUNDS:-1}
      turns "$last" small 60 benchmarks.training storm-backward@2 --vram 14GiB --steps 10 --limit 50
      turns "$last" large 150 benchmarks.training storm-backward@32 storm-forward@32 --vram 44GiB --steps 4 --limit 70
      ;;
    activations)
      rounds=${ROUNDS:-1}
      turns "$last" activations 150 benchmarks.activations forward_backward --methods storm-auto storm-offload --vram 12.8GiB --limit 70
      ;;
    data)
      rounds=${ROUNDS:-1}
      turns "$last" data 60 benchmarks.data rows tokens --peers --repeat 2 --limit 20 --budget 50
      ;;
    opening)
      rounds=1
      turns "" opening 60 benchmarks.training.opening --processes 2 --as-it-is
      timeout --foreground -k 5 60 python3 -m benchmarks.training.opening --processes 1 --as-it-is --profile --commit "$commit" --out "$work/opening-profile"
      ;;
    ahead) # begins after 30 steps, is judged after 50; the steps before have the same without it
      for round in 1 2; do
        for steps in -without:16:12 :54:12; do
          IFS=: read -r name warm measured <<< "$steps"
          timeout --foreground -k 5 120 python3 -m benchmarks.training storm-forward+clip --vram 14GiB --warm-steps "$warm" --steps "$measured" --limit 105 --commit "$commit" --out "$work/ahead-$round$name"
        done
      done
      ;;
    vocabulary) timeout --foreground -k 5 560 python3 -m benchmarks.vocabulary --limit 90 --commit "$commit" --out "$work/vocabulary" ;;
    first-loss) timeout --foreground -k 5 200 python3 -m benchmarks.finetune.first_loss --rounds 2 --limit 60 --commit "$commit" --out "$work/first-loss" ;;
    *) echo "no such part: $1"; exit 2 ;;
  esac
}

export -f run turns tests
export work commit rounds OLD="${OLD:-}"
(while sleep 10; do pack; done) > /dev/null 2>&1 &
packer=$!
trap 'kill $packer 2> /dev/null; wait $packer 2> /dev/null; pack; rm -rf "$work"' EXIT
trap 'exit 143' TERM INT
failed=0 ended=()
for part in $parts; do
  log="$work/${part//[:,]/-}.log"
  began=$SECONDS
  left=$((${limit:-100000} - SECONDS))
  if [ "$left" -lt 20 ]; then
    status="none (not begun, for want of time)"
    failed=1
  else
    timeout -k 10 "$left" bash -c 'run "$1"' _ "$part" > "$log" 2>&1
    status=$?
    failed=$((failed || status))
    case $status in 124 | 137) status="$status (the limit of all parts)" ;; esac
  fi
  [[ "$part" = *tests ]] && grep -E '^(FAILED|ERROR|E  )' "$log" | cut -c1-300 | head -40
  [ -e "$log" ] && tail -${TAIL:-15} "$log" | cut -c1-300
  ended+=("$part: exit $status, $((SECONDS - began)) s")
  echo "${ended[-1]}"
  pack
done
echo
python3 -m benchmarks.summary "$work" | tee "$out/summary.txt"
printf '%s\n' "${ended[@]}"
exit $failed
