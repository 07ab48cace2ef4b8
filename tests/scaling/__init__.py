"""How the cost of the bench grows: `make bench-scaling` (docs/scaling.md)."""
