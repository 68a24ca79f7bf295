"""Environments served from other processes."""
