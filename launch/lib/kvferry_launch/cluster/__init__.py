"""launch/cluster: starts the deployment that a YAML file describes, on this host, over ssh, by Slurm, MPI or
Kubernetes.

This sub-package needs PyYAML. Its modules may import `node` and the top-level modules of kvferry_launch.
"""
