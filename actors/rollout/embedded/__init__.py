"""The embedded engine: a small CPU inference server for tiny models that speaks a subset of SGLang's HTTP API."""
