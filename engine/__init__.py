"""The inference engine of both workers: model, attention, KV pool, sampler, weights, runner."""
