"""Commands, configuration and recipes: the only place that puts the parts together."""
