"""What a day on a machine with a GPU does: `make gpu-day` (docs/clusters.md)."""
