#!/usr/bin/env bash
# Run a topology on the nodes of a Slurm job: the n-th node of the file on the n-th node of the job.
#
#     sbatch --nodes=2 --gpus-per-node=8 topologies/cluster/slurm.sh topologies/disaggregate-2x8gpu.toml
#
# Submit it at the root of a checkout that all nodes see, after bin/setup. Arguments go on to bin/start-topology. scancel
# stops the run as Ctrl-C does, and the same command resumes it. Once one node has ended, the others have 30 s.
#SBATCH --job-name=physarum
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
exec srun --wait=30 --label bin/start-topology "$@" --node auto
