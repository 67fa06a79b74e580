"""Sinks for metrics: one short file per implementation of the port Tracker."""
