"""launch/cluster: one YAML to a whole deployment, on this host, over ssh, under Slurm, by MPI or on Kubernetes."""
