"""The order of samples, slots, sampler and loader."""
