"""Megatron-core adapter: mesh, models, policy shards, log-probs, sharded checkpoints, weight export."""
