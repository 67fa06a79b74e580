"""Losses over per-token streams, one short file each, registered by name.

`loss(logprobs, entropy, streams, settings) -> (sum, metrics)`: tensors `[action tokens]` of one
micro-batch; `streams` holds behaviour_logprobs, advantages, loss_weight, span. The sum is final: the
global denominators are inside `loss_weight`, so any split over micro-batches and ranks adds up to the same
loss. Metrics are sums as well, except names that start with `max_`.
"""
