"""Environments: tools, tasks and their verified instances."""
