"""Bindings: everything that crosses a process or drives a model runtime."""
