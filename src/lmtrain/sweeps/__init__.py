"""Sweeps (-m): one run per trial, recorded and resumable."""
