#!/usr/bin/env bash
# A Parquet table through several replicas, Ray actors each, into a Parquet table.
#
#   examples/parquet_fleet.sh MODEL QUESTIONS.parquet PROMPT_COLUMN [REPLICAS] [SLOTS]
set -euo pipefail
model=$1 table=$2 column=$3 replicas=${4:-4} slots=${5:-64}

batchbound plan "$table" --prompt-column "$column" --lengths constant:64 --longest-completion 64 \
    --model "$model" --replicas "$replicas" --slots "$slots" --overwrite
batchbound run plan.json --model "$model" -o completions.parquet
