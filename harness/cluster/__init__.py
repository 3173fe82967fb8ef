"""Lanes on the nodes of a Slurm cluster: Slurm says where and when, tasks publish, one collector counts."""
