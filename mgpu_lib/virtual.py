"""The virtual GPUs have moved; for a release, this says where to."""

WORDS = (
    "mgpu_lib.virtual is now a library of its own, virtual_gpus: from virtual_gpus import ..., python -m virtual_gpus"
)

if __name__ == "__main__":
    raise SystemExit(WORDS)
raise ImportError(WORDS)
