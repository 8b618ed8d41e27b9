#!/usr/bin/env bash
# An agent from nothing: data and a tiny untrained model -> supervised warm-up -> GRPO in its environment. In minutes.
#   run_agent.sh calculator [options of the GRPO trainer]
# The first word names a module of this folder. Variables are those of examples/quickstart/run_quickstart.sh.
set -euo pipefail
export AGENT=${1:-}
if [[ ! -f "$(dirname "$0")/$AGENT.py" ]]; then
  echo "run_agent.sh ${AGENT:-(no word)}: no such example; name calculator, search, guess or spelling first" >&2
  exit 2
fi
export EXAMPLE=examples/agents OUT=${OUT:-runs/$AGENT} SFT_ARGS="--max_len 256 ${SFT_ARGS:-}"
shift
exec bash "$(dirname "$0")/../quickstart/run_quickstart.sh" "$@"
