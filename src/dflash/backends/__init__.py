"""One folder a backend, the same file names in each: load, target, cache, draft, verify."""
