#!/usr/bin/env bash
# One command a table: run.sh TABLE [section.key=value ...]; the same overrides every time.
#   CONFIG (benchmarks/acceptance/h200.yaml), OUT (results; default: quality-results), SECONDS_EACH (700), SIDE_BY_SIDE (5)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
config=${CONFIG:-$here/../acceptance/h200.yaml} out=${OUT:-quality-results} py=${PY:-python3}
seconds=${SECONDS_EACH:-700} beside=${SIDE_BY_SIDE:-5}
table=${1:?TABLE: base ablation seeds peer scale cost served}; shift
mkdir -p "$out"
run=$("$py" -c 'import sys; from pathlib import Path; from draftsmith.core.config_io import load_config as l
from draftsmith.core.run import RunFolder as R; print(R.of(l(Path(sys.argv[1]), sys.argv[2:])).root)' "$config" "$@")
# Shorter than the base's own training, so that all variants fit; under a name of their own.
short=(train.epochs="${ABLATION_EPOCHS:-5}")

case $table in
base) # samples, states, and the base trained and exported
  "$py" -m draftsmith prepare --config "$config" "$@"; "$py" -m draftsmith capture --config "$config" "$@"
  "$py" -m draftsmith train --config "$config" "$@"
  "$py" -m draftsmith export --config "$config" "$@" export.verify=offline ;;
ablation) # every variant once; ONLY="base loss-*" some of them
  set -f; only=(); [ -z "${ONLY:-}" ] || only=(--only $ONLY); set +f
  "$py" "$here/ablate.py" --config "$config" "$@" "${short[@]}" "${only[@]}" --side-by-side "$beside" \
    --seconds "$seconds" --serve "${SERVE:-0}" --out "$out/ablation.jsonl" || status=$?
  "$py" "$here/tables.py" ablation "$out/ablation.jsonl" --png "$out/ablation.png" | tee "$out/ablation.md"
  [ ! -f "$out/ablation.served.json" ] || "$py" "$here/tables.py" served "$out/ablation.served.json" ;;
seeds) # ONLY="base muon ..." again with two further seeds
  set -f; only=(${ONLY:?names}); set +f
  "$py" "$here/ablate.py" --config "$config" "$@" "${short[@]}" --only "${only[@]}" --seeds 1 2 --side-by-side "$beside" \
    --seconds "$seconds" --out "$out/ablation.jsonl" || status=$?
  "$py" "$here/tables.py" ablation "$out/ablation.jsonl" --png "$out/ablation.png" | tee "$out/ablation.md" ;;
peer) # its own defaults, then our batch and number of steps; a folder that is there is not trained again
  overrides=("$@")
  peer() {
    local name=$1; shift
    [ -f "$out/$name/result.json" ] || "$py" "$here/speculators_baseline.py" --config "$config" "${overrides[@]}" \
      --out "$out/$name" -- "$@"
  }
  # shellcheck disable=SC2086
  peer speculators ${PEER_FLAGS:-}
  # shellcheck disable=SC2086
  peer speculators-ours --total-seq-len 4096 --ttt-steps 7 ${PEER_FLAGS:-} ;;
scale)
  "$py" "$here/scale.py" --config "$config" "$@" --seconds "$seconds" --out "$out/scale.jsonl" || status=$?
  "$py" "$here/tables.py" scale "$out/scale.jsonl" --png "$out/scale.png" | tee "$out/scale.md" ;;
cost)
  "$py" "$here/tables.py" cost "$out/scale.jsonl" "$out"/speculators*/result.json | tee "$out/cost.md" ;;
served) # the peer first: differences are to it; each in a folder that is called as the table shall call it
  drafts=()
  for result in "$out"/speculators*/result.json; do
    name=$(basename "$(dirname "$result")") folder=$("$py" -c 'import json, sys
print([e["folder"] for e in json.load(open(sys.argv[1]))["epochs"] if "folder" in e][-1])' "$result")
    mkdir -p "$out/served/$name"; cp "$folder"/{config.json,model.safetensors} "$out/served/$name/"
    drafts+=("$out/served/$name")
  done
  told=(); for word in "$@"; do told+=(--set "$word"); done
  "$py" -m draftsmith eval compare --config "$config" "${told[@]}" --serve --out "$out/served.json" "${drafts[@]}" "$run/export"
  "$py" "$here/tables.py" served "$out/served.json" | tee "$out/served.md" ;;
*) echo "unknown table $table" >&2; exit 2 ;;
esac
exit "${status:-0}"
