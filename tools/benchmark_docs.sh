#!/usr/bin/env bash
# Measure everything that the pages about benchmarks show, and write them: no figure in them is typed by hand.
#
#   bash tools/benchmark_docs.sh [options] [CONFIG...]     default: every config that needs no download
#
#   --quick               a smoke run: the pages are complete, their figures mean nothing
#   --only PAGE           benchmarks (the configs), curves (the sweeps) or scaling (processes); may be repeated
#   --torch-python PATH   interpreter of an environment with torch, numpy and safetensors: PyTorch takes part too
#   --docs FOLDER         where the pages go (default docs)
#   --reports FOLDER      where the reports go (default out/benchmark_docs)
#   --minutes N           end with an error when it takes longer (default 35)
#
# Run it on a machine that does nothing else.
set -euo pipefail
root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)

say() { printf 'benchmark_docs: %s\n' "$*" >&2; }
die() { say "$1"; exit "${2:-2}"; }

quick=0 torch_python= docs=$root/docs reports=out/benchmark_docs minutes=35
pages=() configs=() wide=1
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,13s/^# \{0,1\}//p' "$root/tools/benchmark_docs.sh"; exit 0;;
    --quick) quick=1; shift;;
    --only|--torch-python|--docs|--reports|--minutes)
      [ $# -ge 2 ] || die "$1 needs a value."
      case "$1" in
        --only)
          case "$2" in benchmarks|curves|scaling) pages+=("$2");; *) die "--only $2: benchmarks, curves or scaling.";; esac;;
        --torch-python) torch_python=$2;;
        --docs) docs=$(realpath -m -- "$2");;
        --reports) reports=$2;;
        --minutes) minutes=$2;;
      esac
      shift 2;;
    -*) die "there is no option $1. bash tools/benchmark_docs.sh --help shows what there is.";;
    *) wide=0; configs+=("$(realpath -m --relative-to "$root" -- "$1")"); shift;;
  esac
done
[[ $minutes =~ ^[1-9][0-9]*$ ]] || die "--minutes $minutes: a whole number of at least 1."
[ ${#pages[@]} -gt 0 ] || pages=(benchmarks curves scaling)
[ ${#configs[@]} -gt 0 ] || for name in mlp_digits alexnet_digits resnet18_digits vit_digits gpt_stdlib gpt_stdlib_bpe bert_stdlib; do
  configs+=("configs/$name.py")
done
[ -d "$docs" ] || die "--docs: there is no folder $docs."

python=$(bash "$root/tools/env.sh")
cd "$root"
export PATH=$(dirname "$python"):$PATH
mkdir -p "$reports"
deadline=$((SECONDS + 60 * minutes))

# measure NAME ARGUMENTS...: one report, in $reports/NAME
measure() {
  local name=$1 left=$((deadline - SECONDS)) status=0
  shift
  [ "$left" -gt 0 ] || die "$minutes minutes are over before $name. --minutes N allows more." 1
  say "$name (${left} s left)"
  timeout "$left" "$python" tools/benchmark.py "$@" --no-plots --output "$reports/$name" >"$reports/$name.log" || status=$?
  [ $status = 124 ] && die "$minutes minutes are over in the midst of $name. --minutes N allows more." 1
  [ $status = 0 ] || die "$name ended with exit code $status." "$status"
}

# write PAGE TITLE REPORT...
write() {
  local page=$1 title=$2 files=() name
  shift 2
  for name in "$@"; do files+=("$reports/$name/report.json"); done
  "$python" tools/benchmark.py docs "${files[@]}" --md "$docs/$page.md" --title "$title"
  say "wrote $page.md"
}

measure_benchmarks() {
  local names=() torch=() config name how=(--modes eager,graph,raw-eager,raw-graph,eager-stock,graph-stock --rounds 8 --block-seconds 0.6 --saves 4)
  [ $quick = 0 ] || how=(--modes eager,graph --rounds 2 --block-seconds 0.05 --saves 0 --check-iterations 2 --no-peak)
  [ -z "$torch_python" ] || torch=(--torch-python "$torch_python")
  for config in "${configs[@]}"; do
    name=$(basename "$config" .py)
    measure "$name" "$config" optim.params=null "${how[@]}" ${torch[@]+"${torch[@]}"}
    names+=("$name")
  done
  if [ $quick$wide = 01 ]; then
    # the width of MiniLM and ViT-S: what a step costs apart from its products weighs less there
    how=(--modes eager,eager-stock --rounds 6 --block-seconds 1.0 --saves 0 --check-iterations 2)
    for name in gpt_stdlib bert_stdlib vit_digits; do
      measure "${name}_wide" "configs/$name.py" optim.params=null model.hidden_size=384 model.num_heads=6 "${how[@]}" ${torch[@]+"${torch[@]}"}
      names+=("${name}_wide")
    done
    measure alexnet_plain configs/alexnet_digits.py model.dropout=0 optim.params=null --modes eager,graph \
      --rounds 6 --block-seconds 0.6 --saves 0 --check-iterations 4 ${torch[@]+"${torch[@]}"}
    names+=(alexnet_plain)
    measure models configs/{t5_stdlib,roberta_stdlib,swin_digits,swinv2_digits,convnext_digits,resmlp_digits,mae_digits}.py \
      optim.params=null --modes eager --rounds 4 --block-seconds 0.4 --saves 0 --check-iterations 4 --no-peak ${torch[@]+"${torch[@]}"}
    names+=(models)
  fi
  if [ $quick = 0 ]; then
    measure checkpoint --checkpoint --rounds 3 --saves 6 --check-iterations 2
    names+=(checkpoint)
  fi
  write benchmarks Benchmarks "${names[@]}"
}

measure_curves() {
  local how=(--modes eager,graph,eager-stock --rounds 6 --block-seconds 0.5 --saves 0 --check-iterations 3 --no-peak)
  local layers=1,2,4,8 lengths=32,64,128,256 batches=4,8,16,32 steps=1,2,4,8
  if [ $quick = 1 ]; then
    how=(--modes eager,graph --rounds 2 --block-seconds 0.05 --saves 0 --check-iterations 2 --no-peak --no-twin)
    layers=1,2 lengths=16,32 batches=2,4 steps=1,2
  fi
  measure layers configs/gpt_stdlib.py "${how[@]}" --sweep "model.num_layers=$layers"
  measure length configs/gpt_stdlib.py "${how[@]}" --sweep "dataloader.train.dataset.sequence_length=$lengths"
  measure batch configs/gpt_stdlib.py "${how[@]}" --sweep "train.train_micro_batch_size=$batches"
  measure accumulation configs/gpt_stdlib.py "${how[@]}" --sweep "train.num_accumulation_steps=$steps" \
    train.train_micro_batch_size=null train.global_batch_size=32
  write benchmarks_curves "Benchmarks: layers, sequence length, batch, accumulation" layers length batch accumulation
}

measure_scaling() {
  local names=(weak strong) kind how=(--modes eager,graph --procs 1,2,4 --rounds 5 --block-seconds 0.6 --saves 0 --check-iterations 4 --no-twin)
  [ $quick = 0 ] || how=(--modes eager --procs 1,2 --rounds 2 --block-seconds 0.05 --saves 0 --check-iterations 2 --no-twin --no-peak)
  for kind in weak strong; do
    measure "$kind" configs/gpt_stdlib.py "${how[@]}" --scaling $kind
  done
  if [ $quick = 0 ]; then
    how=(--modes eager --procs 1,2 --rounds 5 --block-seconds 1.5 --saves 0 --check-iterations 2 --no-twin)
    measure weak_wide configs/gpt_stdlib.py "${how[@]}" --scaling weak model.hidden_size=384 model.num_heads=6 \
      dataloader.train.dataset.sequence_length=128
    names+=(weak_wide)
  fi
  write benchmarks_scaling "Benchmarks: processes" "${names[@]}"
}

for page in "${pages[@]}"; do "measure_$page"; done
