"""External trainers fed with longstep's rollouts and credit, one module each."""
