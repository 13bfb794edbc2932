"""Expert parallelism: the experts of mixture-of-experts layers divided over replicas."""
