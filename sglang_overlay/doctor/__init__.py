"""Looks at a machine and says what it will do to EAGLE over PCIe.

Readers touch the machine once and give ``Facts``; checks are pure functions from facts to
findings; ``show`` and ``page`` print them.
"""
