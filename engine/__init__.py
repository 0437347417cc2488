"""What both workers compute with: model, attention, KV pool, sampler, weights, runner."""
