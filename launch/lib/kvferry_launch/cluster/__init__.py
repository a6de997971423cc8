"""launch/cluster: one YAML file to a running deployment on this host, ssh, Slurm, MPI or Kubernetes.

Needs PyYAML. It may import `node` and the package's top level.
"""
