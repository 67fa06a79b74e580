"""Step stores: where steps wait until their group is complete."""
