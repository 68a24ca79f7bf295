"""Environments of the field behind longstep's interface, one module each."""
