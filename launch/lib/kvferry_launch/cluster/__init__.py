"""launch/cluster: starts the deployment that a YAML file describes, on this host, ssh, Slurm, MPI or Kubernetes.

Needs PyYAML. Its modules may import `node` and the package's top level.
"""
