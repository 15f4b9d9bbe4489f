"""Measures a running server, and says whether speculation pays."""
