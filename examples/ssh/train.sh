#!/bin/bash
# examples/ssh/train.sh "host1 host2" GPUS_PER_HOST run.yaml [section.key=value ...]
# Starts one launcher on each host through ssh, all in this folder (a shared disk, or the same path on each); ends all of
# them when one fails or on Ctrl-C. Without a shared disk the first host holds the checkpoints.
set -euo pipefail
hosts=($1)
per_host=$2
shift 2

address=$(ssh "${hosts[0]}" hostname -I | cut -d ' ' -f 1)
launchers=()
trap 'kill "${launchers[@]}" 2>/dev/null || true' EXIT

for rank in "${!hosts[@]}"; do
    command=$(printf '%q ' accelerate launch \
        --multi_gpu \
        --num_machines "${#hosts[@]}" \
        --num_processes "$((${#hosts[@]} * per_host))" \
        --machine_rank "$rank" \
        --main_process_ip "$address" \
        --main_process_port "${PORT:-29500}" \
        train.py --config "$@")
    # -tt: when this ssh ends, the host's launcher gets SIGHUP and ends its ranks.
    ssh -tt "${hosts[$rank]}" "cd $(printf %q "$PWD") && . .venv/bin/activate && $command" &
    launchers+=($!)
done

for launcher in "${launchers[@]}"; do
    wait -n || exit 1 # the first that fails ends all
done
