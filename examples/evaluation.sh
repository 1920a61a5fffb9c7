#!/usr/bin/env bash
# An evaluation batch: measure the model, plan, run, report, check the claim.
#
#   examples/evaluation.sh MODEL PROMPTS.jsonl [SLOTS]
#
# PROMPTS is OpenAI batch JSONL. Killed at any moment, the same command resumes it.
set -euo pipefail
model=$1 prompts=$2 slots=${3:-64}

[ -f cost.json ] || batchbound profile --model "$model" -o cost.json
[ -f plan.json ] || batchbound plan "$prompts" --model "$model" --cost cost.json --slots "$slots"
batchbound verify plan.json
batchbound run plan.json --model "$model"
batchbound report --html report.html
