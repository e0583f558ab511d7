#!/usr/bin/env bash
# Trains drafters for a target, each by another recipe on the same cached features, and compares tau.
#
#     gumiho train --target TARGET --data QUESTIONS --stages write features --output_dir cache \
#         --target_layer_ids 2 15 -1
#     benchmarks/compare_recipes.sh TARGET cache/work/features PROMPTS [OPTIONS OF gumiho train]
#
# The prompts must not be in the cache. Tau does not depend on the speed of the machine. Stopped and started again, it
# continues. RECIPES and SEEDS choose what to run.
set -euo pipefail
target=$1 features=$2 prompts=$3
shift 3
cross_entropy="--serial_ce_weight 1 --parallel_ce_weight 1 --parallel_ce_start 0"
declare -A options=(
    [published]=""
    [transition]="--transition_rank 64"
    [layers]="--target_layer_ids 2 15 -1"
    [cross_entropy]="$cross_entropy --feature_weight 0"
    [more_cross_entropy]="$cross_entropy"
    [own_features]="--unroll_serial_head"
    [linear_start]="--linear_start"
    [transition_and_start]="--transition_rank 64 --linear_start"
    [all]="--transition_rank 64 --target_layer_ids 2 15 -1 $cross_entropy --unroll_serial_head --linear_start"
)
work=${WORK:-recipes}
for seed in ${SEEDS:-0 1}; do
    for recipe in ${RECIPES:-published transition layers cross_entropy more_cross_entropy own_features linear_start \
        transition_and_start all}; do
        folder=$work/$recipe-$seed
        # shellcheck disable=SC2086
        gumiho train --recipe published --target "$target" --features "$features" --stages train --num_eval_rows 64 \
            --calibrate false --seed "$seed" --output_dir "$folder" ${options[$recipe]} "$@"
        gumiho benchmark --target "$target" --assistant "$folder" --prompts "$prompts" --modes "chain of 7" \
            "tree of 12" "tree of 63" --temperatures 0 1 --output_dir "$folder/benchmark"
    done
done
python "$(dirname "$0")/recipe_table.py" "$work"
