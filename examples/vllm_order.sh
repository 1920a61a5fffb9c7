#!/usr/bin/env bash
# An order for a vLLM server, and the proof of what is left to gain.
#
#   examples/vllm_order.sh MODEL PROMPTS.jsonl [SLOTS]
#
# Starts `vllm serve MODEL` unless SERVER names one that runs, completes the batch file in the order of fewest
# iterations, and prints what was lost against the proven bound.
set -euo pipefail
model=$1 prompts=$2 slots=${3:-64}
server=${SERVER:-}

if [ -z "$server" ]; then
    vllm serve "$model" --port 8000 --max-num-seqs "$slots" --enable-logging-iteration-details >vllm.log 2>&1 &
    trap 'kill $!' EXIT
    server=http://127.0.0.1:8000
    until curl --silent --fail --output /dev/null "$server/v1/models"; do
        kill -0 $! || { tail vllm.log; exit 1; }
        sleep 2
    done
fi

batchbound run "$prompts" --server "$server" --slots "$slots" --model "$model" \
    -o completions.jsonl --trace trace.jsonl
batchbound audit trace.jsonl
