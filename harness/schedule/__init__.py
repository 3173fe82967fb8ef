"""One queue of lanes for every verb: cores, GPUs, interruption, journal; on a Slurm cluster, job arrays."""
