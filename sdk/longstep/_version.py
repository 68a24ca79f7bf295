"""The version of the distribution; CHANGELOG.md carries the same number."""

__version__ = "0.1.0"
