"""The `jdelta` command."""
