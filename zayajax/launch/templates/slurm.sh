#!/bin/bash
# {{ nodes }} nodes of {{ gpus }} GPUs, written by `zayajax launch --slurm`. Partition and account: options of sbatch.
#SBATCH --job-name={{ name }}
#SBATCH --nodes={{ nodes }}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={{ gpus }}
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time={{ time }}
# A node that fails, or a job that has to make way, puts the job back into the queue.
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
# This script is told so long before the end, and passes it on: the run saves and ends.
#SBATCH --signal=B:TERM@{{ before }}
set -u
{% if setup %}
{{ setup }}
{% endif %}

export NCCL_CROSS_NIC="${NCCL_CROSS_NIC:-0}"  # NIC i of each node is on rail i

# A job that comes back goes on with its run.
if [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ]; then
    run=({{ first }})
else
    run=({{ again }})
fi

told=0
tell() {
    told=1
    # Not a signal to srun, which would kill the step.
    scancel --signal=TERM "$SLURM_JOB_ID"
}
trap tell TERM

# One task a node, which is not bound to one core; the first node has the coordinator.
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --label \
    {{ launch }} -- "${run[@]}" &
step=$!
wait "$step"
status=$?
while kill -0 "$step" 2>/dev/null; do  # a signal ends `wait`, not the step
    wait "$step"
    status=$?
done

# At the end of its time a job goes back into the queue. One that somebody stopped does not.
left=$((${SLURM_JOB_END_TIME:-0} - $(date +%s)))
if [ "$told" -eq 1 ] && [ "$status" -ne 0 ] && [ "$left" -gt 0 ] && [ "$left" -le {{ before }} ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
