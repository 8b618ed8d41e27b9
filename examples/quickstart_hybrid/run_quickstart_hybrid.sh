#!/usr/bin/env bash
# The quickstart with a hybrid model: the additions of the quickstart and a tiny untrained Qwen3.5, of which one layer has a
# state and one attends -> supervised warm-up -> GRPO on two FSDP2 ranks.
# Arguments and variables are those of examples/quickstart/run_quickstart.sh, e.g.  run_quickstart_hybrid.sh --seed 2
set -euo pipefail
export EXAMPLE=examples/quickstart_hybrid
exec bash "$(dirname "$0")/../quickstart/run_quickstart.sh" "$@"
