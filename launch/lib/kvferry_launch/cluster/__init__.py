"""launch/cluster: runs the deployment that a YAML file describes, on this host, over ssh, or by Slurm, MPI or
Kubernetes.

This sub-package needs PyYAML to read YAML files and to write Kubernetes manifests. Its modules may import `node` and
the top-level modules of kvferry_launch.
"""
