"""Workloads of a fabric run: from sizes, a model, a plan or a Chakra trace."""
