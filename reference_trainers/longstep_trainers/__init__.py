"""Reference trainers: readable PyTorch implementations of the algorithms for step-independent rollouts."""
