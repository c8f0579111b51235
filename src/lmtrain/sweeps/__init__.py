"""Parts of a sweep (sweep.py runs it)."""
