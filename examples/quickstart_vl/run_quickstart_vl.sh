#!/usr/bin/env bash
# The quickstart that sees: pictures and a tiny untrained Qwen2.5-VL -> supervised warm-up -> GRPO on two FSDP2 ranks.
# Arguments and variables are those of examples/quickstart/run_quickstart.sh, e.g.  run_quickstart_vl.sh --seed 2
set -euo pipefail
export EXAMPLE=examples/quickstart_vl SFT_ARGS="--max_epochs 4 --max_steps 400 ${SFT_ARGS:-}"
exec bash "$(dirname "$0")/../quickstart/run_quickstart.sh" "$@"
