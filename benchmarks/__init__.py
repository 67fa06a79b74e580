"""One file a benchmark; `python -m benchmarks.NAME --json` prints one JSON object as its last line."""
