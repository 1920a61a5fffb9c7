#!/usr/bin/env bash
# A job as linear models that any MIP solver reads, solved here by HiGHS.
#
#   examples/export_mps.sh [WORKLOAD] [SLOTS]
set -euo pipefail
workload=${1:-table3:0:6} slots=${2:-2}

for formulation in repaired slot-free; do
    batchbound export "$workload" --slots "$slots" --formulation "$formulation" -o "$formulation.mps" --overwrite
done
batchbound compare repaired.mps slot-free.mps --solvers highs --time-limit 60
