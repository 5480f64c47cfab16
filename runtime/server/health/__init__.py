"""Probes, metrics, version and the deployment's status."""
